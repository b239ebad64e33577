"""What a forward pass keeps for its backward, and what the loss needs.

The coefficients were counted by running one layer of transformers 5.23 and PEFT 0.21 under a dispatch mode that follows
every allocation (torch 2.13); tests/planning/test_plan_memory.py counts them again. They are those of attention with a
gated MLP; other layers are taken for one of their widths. Left out, each below one percent at the lengths that matter:
the log-sum-exp of attention, the norms' inverse deviations, cosines and sines.
"""

from dataclasses import dataclass

from pi_lora.planning.parameters import BFLOAT16, FLOAT32, head_trains
from pi_lora.planning.shape import Shape
from pi_lora.recipe.schema import Tuning

# The chunked loss of TRL 1.16 works on tiles of the logits (trl/kernels/chunked_logprob.py, trl/trainer/utils.py).
LOSS_TILE_TOKENS, LOSS_TILE_VOCABULARY = 4096, 32768
# Running maximum, sums, target logit and the like, in float32 per token (the same file).
LOSS_STATISTICS = 12
# With offloading, saved inputs on the device at once: one on its way out, one in use, two on their way in
# (measured in TRL's long-context guide: "only 4 are ever resident at once").
RESIDENT_WHEN_OFFLOADED = 4


@dataclass(frozen=True)
class _Layer:
    """How many bfloat16 tensors a layer keeps for its backward, and has at the peak of its recomputation and backward.

    The pairs count tensors of the hidden and of the intermediate width; `queries` and `keys` are kept throughout.
    `chunked` counts hidden widths kept and at the peak where the MLP runs in chunks, without the MLP's own tensors.
    """

    kept: tuple[float, float]
    peak: tuple[float, float]
    queries: float
    keys: float
    chunked: tuple[float, float]


# Two norms keep 3 each (a float32 copy and the normalized values), or 2 when frozen; linear layers their inputs,
# attention q, k, v and its output, the MLP four tensors of its width; the backward of the MLP adds two. Frozen linear
# layers keep no input, LoRA a copy of it for itself. The LoRA rows are those of frozen norms. A chunked MLP keeps
# its input alone; the peak then is in the backward of the float32 norm before it.
_ALL_WEIGHTS = _Layer((8, 4), (11, 6), 2, 2, chunked=(8, 11))
# Autocast over float32 weights: the residual stream is float32, and every linear layer casts its input for itself.
_ALL_WEIGHTS_FLOAT32 = _Layer((11, 4), (13, 6), 2, 2, chunked=(11, 16))
_LORA_ALL = _Layer((9, 4), (15, 7), 3, 2, chunked=(8, 19))
_LORA_ATTENTION = _Layer((7, 3), (10, 6), 3, 2, chunked=(8, 19))
# DoRA multiplies with the base's weights a second time and keeps every product.
_DORA = _Layer((13, 8), (19, 11.5), 5, 6, chunked=(10, 13))
# During the backward of a chunked MLP: the gradients of its output, its input and the residual stream.
_AROUND_CHUNKS = 3


def layer_bytes(
    shape: Shape, tuning: Tuning, wide_stream: bool, gathered: bool, context_parallel: int = 1, mlp_share: float = 1.0
) -> tuple[float, float]:
    """Return bytes per token of one layer: kept for the backward, and at the peak of its recomputation and backward.

    `wide_stream` says that hidden states are float32 (float32 weights under autocast); `gathered`, that weights come
    in bfloat16 from FSDP2, where LoRA's inputs need no cast and no copy. The peak is in the backward of the MLP, or in
    that of attention where context parallelism gathers the keys and values of the whole sequence. `mlp_share` is the
    share of the tokens that an MLP takes at a time.
    """
    layer = _layer(tuning, wide_stream, gathered)
    of_attention = _bytes(shape, queries=layer.queries, keys=layer.keys)
    kept, peak = (_bytes(shape, *tensors) + of_attention for tensors in (layer.kept, layer.peak))
    in_attention = _bytes(shape, layer.kept[0]) + of_attention
    if mlp_share < 1:
        kept, chunked_peak = (_bytes(shape, tensors) + of_attention for tensors in layer.chunked)
        in_attention = kept
        chunk = _bytes(shape, layer.peak[0] - layer.kept[0], layer.peak[1])
        around = _bytes(shape, _AROUND_CHUNKS) * (2 if wide_stream else 1)
        peak = min(peak, max(chunked_peak, kept + around + mlp_share * chunk))
    # Gradients of q, k and v; the other devices' k and v, and their gradients (torch's all-gather rotation).
    others = 4 * context_parallel if context_parallel > 1 else 0
    in_attention += _bytes(shape, queries=1, keys=2 + others)
    extra = _norm_bytes(shape, tuning)
    return kept + extra, max(peak, in_attention) + extra


def _layer(tuning: Tuning, wide_stream: bool, gathered: bool) -> _Layer:
    if tuning.method == "full":
        return _ALL_WEIGHTS_FLOAT32 if wide_stream else _ALL_WEIGHTS
    if tuning.dora:
        return _DORA
    if tuning.targets == "attention":
        return _LORA_ATTENTION
    return _ALL_WEIGHTS if gathered else _LORA_ALL


def _bytes(shape: Shape, hidden: float = 0, intermediate: float = 0, queries: float = 0, keys: float = 0) -> float:
    """Return bytes per token of bfloat16 tensors, so many of each of the model's widths."""
    of_mlp = hidden * shape.hidden + intermediate * shape.intermediate
    return (of_mlp + queries * shape.queries + keys * shape.keys) * BFLOAT16


def _norm_bytes(shape: Shape, tuning: Tuning) -> float:
    """Return what norms keep beyond the rows above: two frozen ones of LoRA, or two trained ones of full tuning.

    A norm of q and k keeps a float32 copy, a third or fourth norm of hidden states (Gemma) its float32 values as well,
    and one that trains beside LoRA the normalized values.
    """
    trained = tuning.method == "full" or tuning.embeddings_and_norms
    hidden = 4 * max(0, shape.norms - 2) + (2 if trained and tuning.method != "full" else 0)
    of_heads = 2 + trained if shape.head_normed else 0
    return _bytes(shape, hidden, 0, of_heads, of_heads)


def saved_inputs(shape: Shape, tokens: int, wide_stream: bool = False, offloaded: bool = False) -> int:
    """Return bytes of the layer inputs that checkpointing keeps on the device: layers x tokens x hidden.

    >>> from pi_lora.planning.shape import find_shape
    >>> _, shape = find_shape("huggyllama/llama-7b")
    >>> saved_inputs(shape, 8192) == 32 * 8192 * 4096 * 2
    True
    """
    resident = min(shape.layers, RESIDENT_WHEN_OFFLOADED) if offloaded else shape.layers
    return resident * tokens * shape.hidden * (FLOAT32 if wide_stream else BFLOAT16)


def loss_bytes(shape: Shape, tuning: Tuning, tokens: int, wide_stream: bool) -> int:
    """Return bytes of TRL's chunked loss: a tile of logits, the final hidden states with gradient, the head's gradient.

    It never holds `tokens x vocabulary`; gradients of the hidden states and of the head are summed in float32.
    """
    tile = min(tokens, LOSS_TILE_TOKENS) * min(shape.vocabulary, LOSS_TILE_VOCABULARY) * BFLOAT16
    stream = FLOAT32 if wide_stream else BFLOAT16
    hidden = tokens * shape.hidden * (stream + FLOAT32 + stream)
    head = shape.embedding * FLOAT32 if head_trains(shape, tuning) else 0
    return tile + hidden + head + tokens * LOSS_STATISTICS * FLOAT32
