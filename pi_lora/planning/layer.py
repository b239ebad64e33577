"""Memory that one layer takes in training.

The coefficients were counted by running one layer of transformers 5.23 and PEFT 0.21 under a dispatch mode that follows
every allocation (torch 2.13). tests/planning/test_plan_memory.py counts them again. They hold for attention, or the
gated delta rule, with a gated MLP; other layers are treated as such a layer of the same widths.
"""

from typing import Literal, NamedTuple

from pi_lora.models.shape import Shape
from pi_lora.planning.flops import SINK_CHANNELS, Blocks, blocks_of
from pi_lora.recipe.schema import Tuning

# Bytes per number.
FLOAT32 = 4
BFLOAT16 = 2
# Bytes per head and pair of tokens that `eager` keeps in a layer, and has at the peak: the weights, in float32 and in
# the dtype of the products.
_EAGER = {FLOAT32: 4, BFLOAT16: 6}
_EAGER_PEAK = 12
# Bytes per head and pair of tokens of a block with soft caps, at the peak.
_CAPPED_PEAK = 14


# The dtypes of weights and hidden states.
# - bfloat16, float32: of both;
# - autocast: products in bfloat16, of float32 weights and hidden states;
# - casts: PEFT's, from a bfloat16 base to its float32 adapter, without autocast or where dropout forbids it.
Arithmetic = Literal["bfloat16", "autocast", "float32", "casts"]
# With float32 hidden states.
WIDE_STREAM = ("autocast", "float32")
# Tensors that a layer keeps for its backward outside attention: (of the hidden width, of the intermediate width), in
# bfloat16; a float32 tensor counts as two. The MLP keeps four tensors of the intermediate width. Linear layers that
# train keep their inputs, under autocast also a cast of them. Frozen norms under LoRA keep their input as float32. LoRA
# on attention alone takes up to a fifth less.
_FULL = {"bfloat16": (8, 4), "autocast": (11, 4), "float32": (10, 8)}
_LORA = {"bfloat16": (6, 4), "autocast": (7, 4), "float32": (6, 8), "casts": (16, 5)}
# Tensors that the backward of the MLP adds.
_BACKWARD = {"bfloat16": (2, 2), "autocast": (2, 2), "float32": (4, 4), "casts": (6, 1.75)}
# LoRA on experts adds a product to the weights of the experts: bytes at the peak per number of one layer's experts. The
# backward keeps 2.0 of them.
ADAPTED_EXPERTS = 2.7
# Tensors that a layer with the gated delta rule keeps: of the keys, of the values, and of the values in float32. The
# allocations of the kernels were read in the code of flash-linear-attention 0.5.
_DELTA_KEYS = 4
_DELTA_VALUES = 5.5
_DELTA_FLOAT_VALUES = 3
# Bytes for each channel of the values that transformers' own code keeps more, with heads of 128 channels.
_DELTA_IN_TORCH = 75
# Tensors of the hidden width for each expert of a token: kept, and added by the backward. Experts compute in the dtype
# of their weights, also under autocast (transformers 5.23, `_grouped_mm`).
_EXPERTS_KEPT = 2
_EXPERTS_BACKWARD = 3
# Tensors of the intermediate width that clamped experts keep beside the four.
_CLAMPED_KEPT = 3
# At the peak of a chunked MLP, beyond kept tensors: tensors of the hidden width after the last chunk, in the backward
# of the norm; or fewer of them beside a chunk, which takes the chunk's share of what a whole MLP takes.
_AFTER_CHUNKS = 9.5
_BESIDE_A_CHUNK = 2


def hidden_states(shape: Shape, tokens: int, arithmetic: Arithmetic) -> int:
    """Return bytes of a layer's input, which checkpointing saves."""
    number_bytes = FLOAT32 if arithmetic in WIDE_STREAM else BFLOAT16
    return tokens * shape.hidden * number_bytes


def product_bytes(arithmetic: Arithmetic) -> int:
    """Return bytes of a number that linear layers and attention compute."""
    return FLOAT32 if arithmetic == "float32" else BFLOAT16


class AttentionBytes(NamedTuple):
    """Bytes of one sequence that a kernel takes beyond queries, keys, values and output.

    Attributes:
        full: Kept for the backward by a layer that attends to everything.
        sliding: Kept by a layer that attends to a window.
        peak: Of a layer in its backward.
        masks: Of all layers together.
    """

    full: float = 0
    sliding: float = 0
    peak: float = 0
    masks: float = 0


def attention_bytes(shape: Shape, attention: str, tokens: int, arithmetic: Arithmetic, on_cpu: bool) -> AttentionBytes:
    """Return the bytes of a kernel, by its name in a recipe, for a sequence of `tokens`.

    `sdpa` makes a mask of bytes for sliding windows, and every layer keeps it as numbers. `eager` keeps the weights of
    all pairs of tokens. Both repeat the keys for the heads that share them. FlashAttention needs none of these.
    """
    pairs = tokens * tokens
    number_bytes = product_bytes(arithmetic)
    repeated_keys = 2 * tokens * (shape.queries - shape.keys) * number_bytes
    slides = bool(shape.sliding_layers) and shape.sliding_window < tokens
    if attention == "eager":
        kept = pairs * shape.heads * _EAGER[number_bytes] + repeated_keys
        masks = bool(shape.full_layers) + bool(shape.sliding_layers)
        return AttentionBytes(kept, kept, pairs * shape.heads * _EAGER_PEAK, masks * pairs * number_bytes)
    if attention == "sdpa" and slides:
        return AttentionBytes(sliding=pairs * number_bytes + repeated_keys, masks=pairs)
    full = sliding = peak = 0.0
    if attention == "auto" and shape.in_blocks:
        blocks = blocks_of(tokens, 0, on_cpu)
        full = _block_numbers(shape, tokens, blocks) * number_bytes
        sliding = full
        if shape.soft_capped:
            peak = full + blocks.size * tokens * shape.heads * _CAPPED_PEAK
    if attention == "auto" and slides:
        sliding = _block_numbers(shape, tokens, blocks_of(tokens, shape.sliding_window, on_cpu)) * number_bytes
    return AttentionBytes(full, sliding, peak)


def _block_numbers(shape: Shape, tokens: int, blocks: Blocks) -> float:
    """Return the numbers that blocks keep: their masks, for all heads that share keys, copies of keys and values, and
    the outputs, which are joined later.
    """
    masks = shape.queries / shape.keys * blocks.pairs
    copies = 2 * shape.keys * (blocks.pairs / blocks.size - tokens)
    width = 1.0
    if shape.in_blocks and not shape.soft_capped:
        width += SINK_CHANNELS * shape.heads / shape.queries
    return masks + width * (copies + tokens * shape.queries)


def layer_bytes(
    shape: Shape,
    tuning: Tuning,
    arithmetic: Arithmetic,
    context_parallel: int = 1,
    mlp_share: float = 1.0,
    *,
    on_cpu: bool = False,
) -> tuple[float, float]:
    """Return bytes per token of one layer: kept for the backward, and at the peak of recomputation and backward.

    Kept is the mean of all layers. The peak is in the backward of the MLP; or in that of attention, where context
    parallelism gathers the keys and values of the whole sequence. `mlp_share` is the share of the tokens that the MLP
    takes at a time. On a CPU the gated delta rule has no kernels.
    """
    full = tuning.method == "full"
    tensors = _FULL if full else _LORA
    hidden, intermediate = tensors[arithmetic]
    # Tensors of bfloat16 per tensor of attention.
    width = 2 if arithmetic == "float32" else 1
    # A third and fourth norm of hidden states (Gemma) keep their input in float32. Where they train they also keep the
    # normalized values, and where not, their backward makes as much.
    more_norms = max(0, shape.norms - 2)
    norms = 2 * more_norms
    normalized = _bytes(shape, 2 * more_norms)
    if tuning.with_norms and not full:
        # The normalized values of norms that train with LoRA.
        norms += 4 if arithmetic in WIDE_STREAM or shape.float_norms else 2
    if full and arithmetic == "bfloat16" and shape.float_norms:
        norms += 2
    common = _bytes(shape, norms)
    in_attention, attention_at_peak = _attention(shape, tuning, width)
    if shape.delta_layers:
        delta = _delta_rule(shape, width * BFLOAT16, on_cpu)
        share = shape.delta_layers / shape.layers
        in_attention = in_attention * (1 - share) + delta * share
        attention_at_peak = max(attention_at_peak, delta)
    if not full:
        # Between the matrices of an adapter.
        common += tuning.rank * _adapted_linears(shape, tuning) * width * BFLOAT16
    experts_hidden = shape.experts_per_token
    if arithmetic in WIDE_STREAM:
        experts_hidden *= 2
    if shape.clamped:
        intermediate += _CLAMPED_KEPT * width
    if arithmetic == "autocast" and shape.experts:
        intermediate *= 2
    hidden += _EXPERTS_KEPT * experts_hidden
    kept = _bytes(shape, hidden, intermediate)
    peak = kept + _bytes(shape, *_BACKWARD[arithmetic]) + _bytes(shape, _EXPERTS_BACKWARD * experts_hidden)
    if arithmetic != "float32":
        peak += _bytes(shape, more_norms)  # their backward is in float32
    if mlp_share < 1:
        kept = _bytes(shape, hidden)
        in_a_chunk = _bytes(shape, width * _BESIDE_A_CHUNK) + mlp_share * (peak - kept)
        peak = min(peak, kept + max(_bytes(shape, _AFTER_CHUNKS), in_a_chunk))
    # The gradients of q, k and v; the k and v of all devices, and their gradients (torch's all-gather rotation).
    gathered = width * (shape.queries + (2 + 4 * context_parallel) * shape.keys) * BFLOAT16
    attention_peak = _bytes(shape, hidden) + gathered
    peak = max(peak, attention_peak) + common + attention_at_peak + normalized
    if full or tuning.with_norms:
        kept += normalized
    return kept + common + in_attention, peak


def _attention(shape: Shape, tuning: Tuning, width: int) -> tuple[float, float]:
    """Return bytes per token of attention: kept for the backward, and at the peak. `width` is the number of bfloat16
    tensors that a tensor takes.
    """
    heads = 2 * width  # q and the output, k and v
    normalized = 0
    if shape.head_normed:
        # Norms of q and k keep their input in float32. Where they train they also keep the normalized values, and where
        # not, their backward makes as much.
        heads += 2
        normalized = 2 if shape.float_norms else 1
    at_peak = _bytes(shape, 0, heads=heads + normalized)
    kept = at_peak if tuning.with_norms or tuning.method == "full" else _bytes(shape, 0, heads=heads)
    gated = 0
    if shape.gated:
        # The gate, and the output that it multiplies.
        gated = 2 * width * shape.queries * BFLOAT16
    return kept + gated, at_peak + gated


def _delta_rule(shape: Shape, number_bytes: int, on_cpu: bool) -> float:
    """Return bytes per token that a layer keeps for the backward of the gated delta rule and of the norm after it."""
    values = _DELTA_VALUES * number_bytes + _DELTA_FLOAT_VALUES * FLOAT32
    if on_cpu:
        values += _DELTA_IN_TORCH
    return _DELTA_KEYS * number_bytes * shape.delta_keys + values * shape.delta_values


def _adapted_linears(shape: Shape, tuning: Tuning) -> int:
    """Return how many linear layers of a decoder layer have an adapter, at most."""
    if isinstance(tuning.target_modules, str):
        return len(shape.lora.keys() - {"all-linear", "attention"})
    return len(tuning.target_names)


def _bytes(shape: Shape, hidden: float, intermediate: float = 0, heads: float = 0) -> float:
    """Return bytes per token of bfloat16 tensors: so many of the hidden and the intermediate width, and of q and k."""
    numbers = hidden * shape.hidden + intermediate * shape.intermediate + heads * (shape.queries + shape.keys)
    return numbers * BFLOAT16
