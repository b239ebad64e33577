"""What a forward pass leaves behind for the backward one, and what the loss needs.

The coefficients were counted by running one layer of transformers 5.23 and PEFT 0.21 under a dispatch mode that follows
every allocation (torch 2.13); `tests/test_plan.py` counts again. Left out, each below a percent at the lengths that
matter: the log-sum-exp of attention, the norms' inverse deviations, cosines and sines.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pi_lora.planning.parameters import BFLOAT16, FLOAT32, head_trains
from pi_lora.planning.shape import Shape
from pi_lora.recipe.schema import Tuning

# The chunked loss of TRL 1.16 works on tiles of the logits (trl/kernels/chunked_logprob.py, trl/trainer/utils.py).
LOSS_TILE_TOKENS, LOSS_TILE_VOCABULARY = 4096, 32768
# Running maximum, sums, target logit and the like, in float32 a token (the same file).
LOSS_STATISTICS = 12
# With offloading, saved inputs on the device at once: one on its way out, one in use, two on their way in
# (measured in TRL's long-context guide: "only 4 are ever resident at once").
RESIDENT_WHEN_OFFLOADED = 4
# Bytes for a pair of tokens and a head: softmax in float32 and its bfloat16 copy, and one more of each in the backward.
EAGER_SCORE = 12


@dataclass(frozen=True)
class _Widths:
    """Tensors of bfloat16 a token, in units of the model's widths."""

    hidden: float
    intermediate: float
    queries: float
    keys: float

    def bytes_a_token(self, shape: Shape) -> float:
        numbers = (
            self.hidden * shape.hidden
            + self.intermediate * shape.intermediate
            + self.queries * shape.queries
            + self.keys * shape.keys
        )
        return numbers * BFLOAT16


@dataclass(frozen=True)
class _Layer:
    """One layer's tensors: `kept` for its backward, and `peak` while it is recomputed and walked back through."""

    kept: _Widths
    peak: _Widths
    # The same with the MLP in pieces, whose own tensors are left out.
    cut_kept: _Widths
    cut_peak: _Widths


# Two norms keep 3 each (a float32 copy and what it is normalized to), or 2 when frozen; linear layers their inputs,
# attention q, k, v and its output, the MLP four tensors of its width; the backward of the MLP adds two. Frozen linear
# layers keep no input, LoRA a copy of it for itself. The LoRA rows are those of frozen norms. An MLP in pieces keeps
# its input alone; the peak then is in the backward of the float32 norm before it.
_ALL_WEIGHTS = _Layer(_Widths(8, 4, 2, 2), _Widths(11, 6, 2, 2), _Widths(8, 0, 2, 2), _Widths(11, 0, 2, 2))
# Autocast over float32 weights: the residual stream is float32, and every linear layer casts its input for itself.
_ALL_WEIGHTS_FLOAT32 = _Layer(_Widths(11, 4, 2, 2), _Widths(13, 6, 2, 2), _Widths(11, 0, 2, 2), _Widths(16, 0, 2, 2))
_LORA_ALL = _Layer(_Widths(9, 4, 3, 2), _Widths(15, 7, 3, 2), _Widths(8, 0, 3, 2), _Widths(19, 0, 3, 2))
_LORA_ATTENTION = _Layer(_Widths(7, 3, 3, 2), _Widths(10, 6, 3, 2), _Widths(8, 0, 3, 2), _Widths(19, 0, 3, 2))
# DoRA multiplies with the base's weights a second time and keeps every product.
_DORA = _Layer(_Widths(13, 8, 5, 6), _Widths(19, 11.5, 5, 6), _Widths(10, 0, 5, 6), _Widths(13, 0, 5, 6))
# While an MLP in pieces goes backward: the gradients of its output, its input and the residual stream, as wide as that.
_AROUND_PIECES = _Widths(3, 0, 0, 0)
# What a norm of hidden states, and one of q and k over each head, keeps more where it trains: the normalized values.
_TRAINED_NORM = _Widths(1, 0, 0, 0)
_TRAINED_HEAD_NORMS = _Widths(0, 0, 1, 1)
# A norm of q and k over each head: a float32 copy.
_HEAD_NORMS = _Widths(0, 0, 2, 2)
# A third or fourth norm in a layer (Gemma): a float32 copy and the float32 values it is normalized to.
_ONE_MORE_NORM = _Widths(4, 0, 0, 0)
_NOTHING = _Widths(0, 0, 0, 0)


def layer_bytes(
    shape: Shape, tuning: Tuning, wide_stream: bool, gathered: bool, context_parallel: int = 1, mlp_share: float = 1.0
) -> tuple[float, float]:
    """Bytes a token of one layer: kept for the backward, and at the peak of its recomputation and backward.

    `wide_stream` says that hidden states are float32 (float32 weights under autocast); `gathered`, that weights come
    in bfloat16 from FSDP2, where LoRA's inputs need no cast and no copy. The peak is in the backward of the MLP, or in
    that of attention where context parallelism brings the keys and values of the whole sequence together. `mlp_share`
    is the share of the tokens that an MLP takes at a time.
    """
    layer = _layer(tuning, wide_stream, gathered)
    extra = sum(part.bytes_a_token(shape) for part in _norms(shape, tuning))
    kept, peak = layer.kept.bytes_a_token(shape), layer.peak.bytes_a_token(shape)
    in_attention = kept - replace(_NOTHING, intermediate=layer.kept.intermediate).bytes_a_token(shape)
    if mlp_share < 1:
        kept = in_attention = layer.cut_kept.bytes_a_token(shape)
        piece = _Widths(layer.peak.hidden - layer.kept.hidden, layer.peak.intermediate, 0, 0).bytes_a_token(shape)
        around = _AROUND_PIECES.bytes_a_token(shape) * (2 if wide_stream else 1)
        in_pieces = kept + around + mlp_share * piece
        peak = min(peak, max(layer.cut_peak.bytes_a_token(shape), in_pieces))
    in_attention += _attention_gradients(context_parallel).bytes_a_token(shape)
    return kept + extra, max(peak, in_attention) + extra


def _norms(shape: Shape, tuning: Tuning) -> Iterator[_Widths]:
    """What the layer's norms keep beyond the two frozen ones of LoRA, or the two trained ones of a full tuning."""
    trained = tuning.method == "full" or tuning.embeddings_and_norms
    yield from [_ONE_MORE_NORM] * max(0, shape.norms - 2)
    if trained and tuning.method != "full":
        yield from [_TRAINED_NORM] * 2
    if shape.head_normed:
        yield _HEAD_NORMS
        if trained:
            yield _TRAINED_HEAD_NORMS


def _attention_gradients(context_parallel: int) -> _Widths:
    """Gradients of q, k and v; the other devices' k and v, and gradients for them (torch's all-gather rotation)."""
    others = 4 * context_parallel if context_parallel > 1 else 0
    return _Widths(0, 0, 1, 2 + others)


def _layer(tuning: Tuning, wide_stream: bool, gathered: bool) -> _Layer:
    if tuning.method == "full":
        return _ALL_WEIGHTS_FLOAT32 if wide_stream else _ALL_WEIGHTS
    if tuning.dora:
        return _DORA
    if tuning.targets == "attention":
        return _LORA_ATTENTION
    return _ALL_WEIGHTS if gathered else _LORA_ALL


def saved_inputs(shape: Shape, tokens: int, wide_stream: bool, offloaded: bool) -> int:
    """Bytes of the layer inputs that checkpointing saves on the device: layers x tokens x hidden.

    >>> from pi_lora.planning.shape import find_config
    >>> from pi_lora.planning.shape import shape_of
    >>> shape = shape_of(find_config("huggyllama/llama-7b"), "llama-7b")
    >>> saved_inputs(shape, 8192, wide_stream=False, offloaded=False) == 32 * 8192 * 4096 * 2
    True
    """
    resident = min(shape.layers, RESIDENT_WHEN_OFFLOADED) if offloaded else shape.layers
    return resident * tokens * shape.hidden * (FLOAT32 if wide_stream else BFLOAT16)


def eager_bytes(shape: Shape, sequences: int, sequence: int) -> int:
    """Bytes of the attention weights of one layer, which only the `eager` kernel writes out."""
    return sequences * shape.heads * sequence * sequence * EAGER_SCORE


def loss_bytes(shape: Shape, tuning: Tuning, tokens: int, wide_stream: bool) -> int:
    """Bytes of TRL's chunked loss: a tile of logits, the final hidden states and their gradient, the head's gradient.

    It never holds `tokens x vocabulary`; gradients of the hidden states and of the head are summed in float32.
    """
    tile = min(tokens, LOSS_TILE_TOKENS) * min(shape.vocabulary, LOSS_TILE_VOCABULARY) * BFLOAT16
    stream = FLOAT32 if wide_stream else BFLOAT16
    hidden = tokens * shape.hidden * (stream + FLOAT32 + stream)
    head = shape.embedding * FLOAT32 if head_trains(shape, tuning) else 0
    return tile + hidden + head + tokens * LOSS_STATISTICS * FLOAT32


def largest_linear(shape: Shape) -> int:
    """Weights in the widest linear layer: what NF4 unpacks to bfloat16 at a time."""
    return max(linear.weights for linear in shape.linears)
