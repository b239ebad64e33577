"""Memory of one device in training, by component, and at the moment of a training step when the sum is highest.

The coefficients of activations were counted by running one layer of transformers 5.23 and PEFT 0.21 under a dispatch
mode that follows every allocation (torch 2.13). tests/planning/test_plan_memory.py counts them again. They hold for
attention with a gated MLP; other layers are treated as such a layer of the same widths.

Left out: fragmentation of the allocator, shorter sequences, and memory for saving. Also left out is about one percent
or less: the log-sum-exp of attention, the norms' inverse deviations, cosines and sines, and the linear layer that NF4
is unpacking.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pi_lora.models.shape import Shape
from pi_lora.planning.flops import SINK_CHANNELS, Blocks, blocks_of, trained_parameters
from pi_lora.planning.gpus import CPU, GIB, Gpu
from pi_lora.recipe.schema import Recipe, Tuning

# Bytes per number.
FLOAT32 = 4
BFLOAT16 = 2
# Bytes per weight in NF4 with double quantization (Dettmers et al. 2023, section 3): 4 bits, an 8-bit scale for each 64
# weights, and a float32 scale for each 256 of those: 0.5 + 1/64 + 4/(64 * 256) bytes, or 4.127 bits.
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
# Assumed: the device's context, cuBLAS and NCCL workspaces.
OVERHEAD = round(1.5 * GIB)
# Measured on a CPU (benchmarks/plan_memory.py): the interpreter with its libraries.
OVERHEAD_ON_CPU = round(0.7 * GIB)
# Measured on a CPU: the C library holds back freed tensors. In bfloat16 they take about so many times what a layer uses
# at its peak. In float32 they take so many bytes per layer, token and hidden number, at most a GiB: larger tensors
# return to the system.
HELD_ON_CPU = 2
HELD_IN_FLOAT32 = 50
# AdamW's two moments have the precision of their weights. Those of bitsandbytes take a byte each, and a float32 scale
# for 256 of them; moments of embeddings stay in 32 bits (transformers 5.23). Paged moments may leave a full device;
# the plan does not count on it.
ADAMW_MOMENTS = 2
ADAMW_8BIT = 2 * (1 + 4 / 256)
# The chunked loss of TRL 1.16 works on tiles of the logits (trl/kernels/chunked_logprob.py, trl/trainer/utils.py).
LOSS_TILE_TOKENS = 4096
LOSS_TILE_VOCABULARY = 32768
# Tokens whose logits the loss on a CPU has at a time (training/loss.py).
LOSS_TOKENS = 1024
# With offloading, saved inputs on the device at once: one on its way out, one in use, two on their way in
# (measured in TRL's long-context guide: "only 4 are ever resident at once").
RESIDENT_WHEN_OFFLOADED = 4
# A measured peak may be this many times the planned one.
MARGIN = 1.15
# Bytes of logits that a measurement holds at a time, in bfloat16 and twice in float32 (evaluation/forward.py).
MEASURED_LOGITS = 10 * 2**28
# Logits of a measurement on a CPU, and bytes of those that are twice in float32.
MEASURED_LOGITS_ON_CPU = 2**25
MEASURED_FLOATS_ON_CPU = 2 * FLOAT32 * 2**21
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
# Tensors of the hidden width for each expert of a token: kept, and added by the backward. Experts compute in the dtype
# of their weights, also under autocast (transformers 5.23, `_grouped_mm`).
_EXPERTS_KEPT = 2
_EXPERTS_BACKWARD = 3
# Tensors of the hidden width at the peak of a chunked MLP, beyond kept ones and those of a chunk; full tuning takes 8.
_AROUND_CHUNKS = 12


class Moment(NamedTuple):
    """Bytes on one device at a moment of a training step, by component."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int


class States(NamedTuple):
    """Bytes on one device that a step does not change: weights, gradients, AdamW's moments. The gradients include the
    buckets of DistributedDataParallel, which stay when gradients are freed.
    """

    weights: int
    gradients: int
    optimizer: int
    buckets: int


class DeviceMemory(NamedTuple):
    """The highest use of memory in bytes on one device.

    `components` has the maximum of each component and `highest` that of their sum, at possibly different moments.
    `peak` includes the process itself. `host` is the memory that the device pins in the host.
    """

    components: Mapping[str, int]
    highest: int
    peak: int
    host: int


def memory(shape: Shape, recipe: Recipe, original: int, gpu: Gpu) -> DeviceMemory:
    """Return bytes on one device over a training step of a model with an original window of `original` tokens.

    These moments are compared: the loss, the backward through the last layer (all activations are still there), the
    backward through the first layer (all gradients but that of the embedding are there), that of the embedding, and
    measuring between two steps.
    """
    on_cpu = gpu.name == CPU
    sequence_tokens = recipe.data.tokens_per_sequence(original, recipe.context.target)
    tokens = recipe.training.per_device_batch_size * sequence_tokens // recipe.hardware.context_parallel
    float32_weights = recipe.dtype_of_base(on_cpu, gpu.bfloat16) == "float32"
    arithmetic = _arithmetic(recipe, gpu, float32_weights)
    states = _states(shape, recipe, FLOAT32 if float32_weights else BFLOAT16)
    before_loss, *in_backward = _moments_of_step(shape, recipe, states, tokens, arithmetic, on_cpu)
    head_gradient = _head_gradient(shape, recipe.tuning)
    if on_cpu:
        # The sum, and the gradient of the tokens whose logits are there.
        head_gradient *= 2
        if arithmetic == "autocast":
            head_gradient += head_gradient // 4  # which comes in bfloat16
    logits = loss_bytes(shape, tokens, arithmetic, on_cpu) + head_gradient
    moments = [before_loss._replace(logits=logits), *in_backward]
    if recipe.evaluation.every:
        longest = max(original, recipe.context.target)
        moments.append(_measuring(shape, states, longest, arithmetic, on_cpu=on_cpu))
    maxima = Moment(*map(max, *moments))
    highest = max(map(sum, moments))
    peak = highest + _overhead(shape, recipe, tokens, arithmetic, on_cpu)
    if on_cpu:
        # While weights are loaded, the pages of their file are memory of the process.
        stored = shape.parameters * BFLOAT16
        peak = max(peak, OVERHEAD_ON_CPU + states.weights + stored)
    host = 0
    if recipe.hardware.offload_activations:
        # A pinned tensor takes a power of two (torch 2.13).
        host = shape.layers * 2 ** (hidden_states(shape, tokens, arithmetic) - 1).bit_length()
    return DeviceMemory(
        components=maxima._asdict(),
        highest=highest,
        peak=peak,
        host=host,
    )


def _moments_of_step(
    shape: Shape, recipe: Recipe, states: States, tokens: int, arithmetic: Arithmetic, on_cpu: bool
) -> tuple[Moment, Moment, Moment, Moment]:
    """Return the moments before the loss, at the backward through the last and the first layer, and after it."""
    full = recipe.tuning.method == "full"
    accumulates = recipe.training.global_batch_size > recipe.sequences_at_once
    accumulated = states.gradients if accumulates else 0
    all_casts, kept_casts = _autocast_copies(shape, recipe, arithmetic)
    kept, working = _activations(shape, recipe, tokens, arithmetic, on_cpu)
    before_loss = Moment(
        weights=states.weights + (all_casts if full else kept_casts),
        gradients=accumulated,
        optimizer=states.optimizer,
        activations=kept,
        logits=0,
    )
    head = _head_gradient(shape, recipe.tuning) // recipe.shards
    # The gradient of a tied head waits for that of the embedding, which comes last.
    waiting = head if shape.tied else 0
    embedding = shape.embedding * FLOAT32 // recipe.shards if full or recipe.tuning.with_embeddings else 0
    gradients = states.gradients + waiting if accumulates else states.gradients - embedding + waiting
    whole = _whole_gradients(shape) if full and recipe.shards > 1 else 0
    last_layer = before_loss._replace(
        weights=states.weights + kept_casts,
        gradients=accumulated + waiting if accumulates else head + whole,
        activations=kept + working,
    )
    first_layer = before_loss._replace(
        weights=states.weights,
        gradients=gradients,
        activations=working + kept // shape.layers,
    )
    after_layers = first_layer._replace(
        gradients=gradients + embedding,
        activations=hidden_states(shape, tokens, arithmetic),
    )
    return before_loss, last_layer, first_layer, after_layers


def _measuring(shape: Shape, states: States, longest: int, arithmetic: Arithmetic, *, on_cpu: bool) -> Moment:
    """Return the moment of a measurement of `longest` tokens, which has no gradients and keeps no activations."""
    number_bytes = _product_bytes(arithmetic)
    logits = MEASURED_LOGITS
    if on_cpu:
        logits = MEASURED_LOGITS_ON_CPU * number_bytes + MEASURED_FLOATS_ON_CPU
    return Moment(
        weights=states.weights,
        gradients=states.buckets,
        optimizer=states.optimizer,
        activations=longest * measuring_bytes(shape, arithmetic),
        logits=logits,
    )


def measuring_bytes(shape: Shape, arithmetic: Arithmetic) -> int:
    """Return bytes per token of a forward pass without gradients: at the peak of an MLP, or of attention."""
    stream_bytes = hidden_states(shape, 1, arithmetic)
    number_bytes = _product_bytes(arithmetic)
    queries = 4
    if shape.head_normed and number_bytes == BFLOAT16:
        queries += 1  # in float32
    mlp = 4 * stream_bytes + 3 * shape.intermediate * number_bytes
    attention = 3 * stream_bytes + (queries * shape.queries + 2 * shape.keys) * number_bytes
    return max(mlp, attention)


def _head_gradient(shape: Shape, tuning: Tuning) -> int:
    """Return bytes of the gradient of the head, which is 0 if the head does not train."""
    if tuning.method == "full" or (shape.tied and tuning.with_embeddings):
        return shape.embedding * FLOAT32
    return 0


def _arithmetic(recipe: Recipe, gpu: Gpu, float32_weights: bool) -> Arithmetic:
    """Return how a step computes. Weights that FSDP2 gathers have the dtype of the computation."""
    in_bfloat16 = recipe.computes_in(gpu.name == CPU, gpu.bfloat16) != "float32"
    if recipe.shards > 1:
        return "bfloat16" if in_bfloat16 else "float32"
    if float32_weights:
        return "autocast" if in_bfloat16 else "float32"
    if recipe.tuning.method != "full" and (recipe.tuning.dropout or not in_bfloat16):
        return "casts"
    return "bfloat16"


def _overhead(shape: Shape, recipe: Recipe, tokens: int, arithmetic: Arithmetic, on_cpu: bool) -> int:
    """Return bytes of the process itself, and on a CPU of the freed tensors that it holds."""
    if not on_cpu:
        return OVERHEAD
    if arithmetic in ("float32", "casts"):
        return OVERHEAD_ON_CPU + min(GIB, HELD_IN_FLOAT32 * shape.layers * tokens * shape.hidden)
    _, of_layer = layer_bytes(shape, recipe.tuning, arithmetic)
    return OVERHEAD_ON_CPU + round(HELD_ON_CPU * of_layer * tokens)


def _autocast_copies(shape: Shape, recipe: Recipe, arithmetic: Arithmetic) -> tuple[int, int]:
    """Return bytes of autocast's bfloat16 copies of float32 weights: of all layers, and of those without checkpointing.
    Experts are not copied.

    The backward needs the copies. Checkpointed layers have copies only of weights that train, until the forward pass
    ends.
    """
    if arithmetic != "autocast":
        return 0, 0
    copies = shape.linear_weights * BFLOAT16
    checkpointed = recipe.training.checkpointed_layers(shape.layers)
    return copies, copies * (shape.layers - checkpointed) // shape.layers


def _states(shape: Shape, recipe: Recipe, weight_bytes: int) -> States:
    """Return the states of a step. A weight of the base that is not quantized takes `weight_bytes`."""
    tuning = recipe.tuning
    shards = recipe.shards
    full = tuning.method == "full"
    # NF4 quantizes linear layers only, without head or biases.
    quantized = shape.linear_weights if tuning.method == "qlora" else 0
    base = round(quantized * NF4 + (shape.parameters - quantized) * weight_bytes)
    # Full tuning trains the base in the precision of the base; an adapter is float32 (rule 4 of docs/design.md).
    trained_bytes = weight_bytes if full else FLOAT32
    trained = trained_parameters(shape, tuning) * trained_bytes
    moments = trained * ADAMW_MOMENTS
    if recipe.training.optimizer == "paged_adamw_8bit":
        in_32_bits = shape.embedding * trained_bytes if full or tuning.with_embeddings else 0
        moments = round(in_32_bits * ADAMW_MOMENTS + (trained - in_32_bits) / trained_bytes * ADAMW_8BIT)
    weights = base // shards if full else (base + trained) // shards
    gradients = trained // shards
    if shards > 1:
        # FSDP2 gathers in bfloat16 the current layer, the next one, and the head (accelerate 1.15).
        weights += (2 * shape.layer + shape.embedding) * BFLOAT16
        if full:
            gradients += _whole_gradients(shape)
    buckets = gradients if shards == 1 and recipe.hardware.processes > 1 else 0
    return States(weights, gradients + buckets, moments // shards, buckets)


def _whole_gradients(shape: Shape) -> int:
    """Return bytes of gradients that FSDP2 has not scattered yet: of two layers, and of one in float32 to be summed."""
    return shape.layer * (2 * BFLOAT16 + FLOAT32)


def hidden_states(shape: Shape, tokens: int, arithmetic: Arithmetic) -> int:
    """Return bytes of a layer's input, which checkpointing saves."""
    number_bytes = FLOAT32 if arithmetic in WIDE_STREAM else BFLOAT16
    return tokens * shape.hidden * number_bytes


def _product_bytes(arithmetic: Arithmetic) -> int:
    """Return bytes of a number that linear layers and attention compute."""
    return FLOAT32 if arithmetic == "float32" else BFLOAT16


def loss_bytes(shape: Shape, tokens: int, arithmetic: Arithmetic, on_cpu: bool) -> int:
    """Return bytes of a loss: a tile of logits, and the final hidden states with their gradients, once more in
    float32.
    """
    rows = min(shape.vocabulary, LOSS_TILE_VOCABULARY)
    tile = min(tokens, LOSS_TILE_TOKENS) * rows
    if arithmetic == "autocast":
        # Copies of rows of the head: for this tile, and for the one before.
        copies = 2 if tokens > LOSS_TILE_TOKENS or shape.vocabulary > rows else 1
        tile += copies * rows * shape.hidden
    if on_cpu:
        copied = shape.hidden if arithmetic == "autocast" else 0
        tile = (min(tokens, LOSS_TOKENS) + copied) * shape.vocabulary
    states_and_gradients = 2 * hidden_states(shape, tokens, arithmetic) + tokens * shape.hidden * FLOAT32
    return tile * _product_bytes(arithmetic) + states_and_gradients


def _activations(shape: Shape, recipe: Recipe, tokens: int, arithmetic: Arithmetic, on_cpu: bool) -> tuple[int, int]:
    """Return bytes kept from the forward pass, and bytes used on top of them inside one layer."""
    training = recipe.training
    tuning = recipe.tuning
    mlp_share = min(1.0, (training.mlp_chunk_tokens or tokens) / tokens)
    kept_per_token, peak_per_token = layer_bytes(
        shape, tuning, arithmetic, context_parallel=recipe.hardware.context_parallel, mlp_share=mlp_share
    )
    adapted_experts = 0.0
    if tuning.method != "full" and tuning.target_modules == "all-linear":
        adapted_experts = ADAPTED_EXPERTS * shape.experts / shape.layers
    kept = kept_per_token * tokens + adapted_experts
    peak = peak_per_token * tokens + adapted_experts
    checkpoint = hidden_states(shape, tokens, arithmetic)
    if training.activation_checkpointing == "selective":
        checkpoint += tokens * shape.queries * _product_bytes(arithmetic)
    checkpointed = training.checkpointed_layers(shape.layers)
    resident = RESIDENT_WHEN_OFFLOADED if recipe.hardware.offload_activations else checkpointed
    sequences = training.per_device_batch_size
    attention = attention_bytes(shape, recipe.model.attention, tokens // sequences, arithmetic, on_cpu)
    of_layer = sequences * max(attention.full, attention.sliding)
    of_layers = sequences * (shape.full_layers * attention.full + shape.sliding_layers * attention.sliding)
    uncheckpointed = shape.layers - checkpointed
    kept_in_all = resident * checkpoint + uncheckpointed * (kept + of_layers / shape.layers)
    working = max(peak + of_layer, sequences * attention.peak)
    if not checkpointed:
        working -= kept + of_layer
    return round(kept_in_all + sequences * attention.masks), round(working)


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
    number_bytes = _product_bytes(arithmetic)
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
    shape: Shape, tuning: Tuning, arithmetic: Arithmetic, context_parallel: int = 1, mlp_share: float = 1.0
) -> tuple[float, float]:
    """Return bytes per token of one layer: kept for the backward, and at the peak of recomputation and backward.

    The peak is in the backward of the MLP; or in that of attention, where context parallelism gathers the keys and
    values of the whole sequence. `mlp_share` is the share of the tokens that the MLP takes at a time.
    """
    full = tuning.method == "full"
    tensors = _FULL if full else _LORA
    hidden, intermediate = tensors[arithmetic]
    # Tensors of bfloat16 per tensor of attention, which keeps q and the output, k and v.
    width = 2 if arithmetic == "float32" else 1
    heads = 2 * width
    # A third and fourth norm of hidden states (Gemma) also keep their float32 values.
    more_norms = max(0, shape.norms - 2)
    norms = 4 * more_norms
    if shape.head_normed:
        heads += 3  # norms of q and k keep a float32 copy
        heads += more_norms > 0  # and Gemma's the normalized values
    if tuning.with_norms and not full:
        norms += 4 if arithmetic in WIDE_STREAM else 2  # the normalized values, of norms that train with LoRA
    common = _bytes(shape, norms, heads=heads)
    experts_hidden = shape.experts_per_token
    if arithmetic in WIDE_STREAM:
        experts_hidden *= 2
    if arithmetic == "autocast" and shape.experts:
        intermediate *= 2
    hidden += _EXPERTS_KEPT * experts_hidden
    kept = _bytes(shape, hidden, intermediate)
    peak = kept + _bytes(shape, *_BACKWARD[arithmetic]) + _bytes(shape, _EXPERTS_BACKWARD * experts_hidden)
    if arithmetic != "float32":
        peak += _bytes(shape, more_norms)  # their backward is in float32
    if mlp_share < 1:
        kept = _bytes(shape, hidden)
        peak = min(peak, kept + _bytes(shape, _AROUND_CHUNKS) + mlp_share * peak)
    # The gradients of q, k and v; the k and v of all devices, and their gradients (torch's all-gather rotation).
    gathered = width * (shape.queries + (2 + 4 * context_parallel) * shape.keys) * BFLOAT16
    attention_peak = _bytes(shape, hidden) + gathered
    return kept + common, max(peak, attention_peak) + common


def _bytes(shape: Shape, hidden: float, intermediate: float = 0, heads: float = 0) -> float:
    """Return bytes per token of bfloat16 tensors: so many of the hidden and the intermediate width, and of q and k."""
    numbers = hidden * shape.hidden + intermediate * shape.intermediate + heads * (shape.queries + shape.keys)
    return numbers * BFLOAT16
