"""Memory of one device in training, by component, and at the moment of a training step when the sum is highest.

Left out: fragmentation of the allocator, shorter sequences, and memory for saving. Also left out is about one percent
or less: the log-sum-exp of attention, the norms' inverse deviations, cosines and sines, and the linear layer that NF4
is unpacking.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pi_lora.models.files import BITSANDBYTES, quantization_of
from pi_lora.models.shape import Shape
from pi_lora.planning.flops import adapts_experts, linear_adapter_parameters, trained_parameters, trains_head
from pi_lora.planning.gpus import CPU, GIB, Gpu
from pi_lora.planning.layer import (
    ADAPTED_EXPERTS,
    BFLOAT16,
    FLOAT32,
    WIDE_STREAM,
    Arithmetic,
    attention_bytes,
    hidden_states,
    layer_bytes,
    product_bytes,
)
from pi_lora.recipe.schema import Recipe, Tuning
from pi_lora.scaling.config import Config

# Bytes per weight in NF4 with double quantization (Dettmers et al. 2023, section 3): 4 bits, an 8-bit scale for each 64
# weights, and a float32 scale for each 256 of those: 0.5 + 1/64 + 4/(64 * 256) bytes, or 4.127 bits.
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
# Without double quantization: 4 bits, and a float32 scale for each 64 weights.
FOUR_BITS = 0.5 + 4 / 64
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
# The loss on a CPU (training/loss.py): tokens whose logits it has at a time, and logits that become float32 at a time,
# in five tensors of 2 MiB, which stay in the caches.
LOSS_TOKENS = 1024
FLOAT_LOGITS = 2**19
# With offloading, saved inputs on the device beside that of the layer that computes: transformers 5.23 copies them on
# the computing stream.
RESIDENT_WHEN_OFFLOADED = 1
# A measured peak may be this many times the planned one.
MARGIN = 1.15
# Bytes of logits that a measurement holds at a time, in bfloat16 and twice in float32 (evaluation/forward.py).
MEASURED_LOGITS = 10 * 2**28
# Logits of a measurement on a CPU, and bytes of those that are twice in float32.
MEASURED_LOGITS_ON_CPU = 2**25
MEASURED_FLOATS_ON_CPU = 2 * FLOAT32 * 2**21


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


def bytes_of_linear_weights(config: Config) -> float | None:
    """Return bytes of a linear weight that stays quantized by bitsandbytes, as it is stored; None for other models."""
    if quantization_of(config) != BITSANDBYTES:
        return None
    settings = config["quantization_config"]
    if settings.get("load_in_8bit"):
        return 1.0
    return NF4 if settings.get("bnb_4bit_use_double_quant") else FOUR_BITS


def memory(shape: Shape, recipe: Recipe, original: int, gpu: Gpu, *, linear_bytes: float | None = None) -> DeviceMemory:
    """Return bytes on one device over a training step of a model with an original window of `original` tokens.
    `linear_bytes` is that of `bytes_of_linear_weights`.

    These moments are compared: the loss, the backward through the last layer (all activations are still there), the
    backward through the first layer (all gradients but that of the embedding are there), that of the embedding, and
    measuring between two steps.
    """
    on_cpu = gpu.name == CPU
    sequence_tokens = recipe.data.tokens_per_sequence(original, recipe.context.target)
    tokens = recipe.training.per_device_batch_size * sequence_tokens // recipe.hardware.context_parallel
    float32_weights = recipe.dtype_of_base(on_cpu, gpu.bfloat16) == "float32"
    arithmetic = _arithmetic(recipe, gpu, float32_weights)
    states = _states(shape, recipe, FLOAT32 if float32_weights else BFLOAT16, linear_bytes)
    before_loss, *in_backward = _moments_of_step(shape, recipe, states, tokens, arithmetic, on_cpu)
    head_gradient = _head_gradient(shape, recipe.tuning)
    # A head that trains beside a bfloat16 base is float32.
    casts_head = arithmetic == "autocast"
    if arithmetic == "bfloat16" and recipe.tuning.method != "full":
        casts_head = head_gradient > 0
    if on_cpu:
        # The sum, and the gradient of the tokens whose logits are there.
        head_gradient *= 2
        if casts_head:
            head_gradient += head_gradient // 4  # which comes in bfloat16
    logits = loss_bytes(shape, tokens, arithmetic, on_cpu=on_cpu, casts_head=casts_head) + head_gradient
    moments = [before_loss._replace(logits=logits), *in_backward]
    if recipe.evaluation.every:
        longest = max(original, recipe.context.target)
        moments.append(_measuring(shape, states, longest, arithmetic, on_cpu=on_cpu))
    maxima = Moment(*map(max, *moments))
    highest = max(map(sum, moments))
    peak = highest + OVERHEAD
    if on_cpu:
        after_layers = in_backward[-1]
        moments.remove(after_layers)
        # The gradients of embeddings take the place of freed tensors that the C library holds back.
        held = _held_on_cpu(shape, recipe, tokens, arithmetic)
        most = max(sum(after_layers), max(map(sum, moments)) + held)
        # While weights are loaded, the pages of their file are memory of the process.
        stored = shape.parameters * BFLOAT16
        peak = OVERHEAD_ON_CPU + max(most, states.weights + stored)
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
    all_casts, kept_casts = _autocast_copies(shape, recipe, arithmetic)
    kept, working = _activations(shape, recipe, tokens, arithmetic, on_cpu)
    casts = all_casts if full else kept_casts
    if not full and arithmetic in ("bfloat16", "autocast"):
        # Copies of the adapter, until the forward pass ends.
        casts += linear_adapter_parameters(shape, recipe.tuning) * BFLOAT16
    head = _head_gradient(shape, recipe.tuning) // recipe.shards
    # The gradient of a tied head waits for that of the embedding, which comes last.
    waiting = head if shape.tied else 0
    embedding = shape.embedding * FLOAT32 // recipe.shards if full or recipe.tuning.with_embeddings else 0
    if recipe.training.global_batch_size > recipe.sequences_at_once:
        # Those of the sequences before.
        accumulated = states.gradients
        at_last_layer = accumulated + waiting
        at_first_layer = at_last_layer
    else:
        accumulated = 0
        at_last_layer = head
        if full and recipe.shards > 1:
            at_last_layer += _whole_gradients(shape)
        at_first_layer = states.gradients - embedding + waiting
    before_loss = Moment(
        weights=states.weights + casts,
        gradients=accumulated,
        optimizer=states.optimizer,
        activations=kept,
        logits=0,
    )
    last_layer = before_loss._replace(
        weights=states.weights + kept_casts,
        gradients=at_last_layer,
        activations=kept + working,
    )
    first_layer = before_loss._replace(
        weights=states.weights,
        gradients=at_first_layer,
        activations=working + kept // shape.layers,
    )
    # The two gradients of a tied head become a third one.
    summed = waiting if embedding else 0
    after_layers = first_layer._replace(
        gradients=at_first_layer + embedding + summed,
        activations=hidden_states(shape, tokens, arithmetic),
    )
    return before_loss, last_layer, first_layer, after_layers


def _measuring(shape: Shape, states: States, longest: int, arithmetic: Arithmetic, *, on_cpu: bool) -> Moment:
    """Return the moment of a measurement of `longest` tokens, which has no gradients and keeps no activations."""
    number_bytes = product_bytes(arithmetic)
    logits = MEASURED_LOGITS
    if on_cpu:
        logits = MEASURED_LOGITS_ON_CPU * number_bytes + MEASURED_FLOATS_ON_CPU
    return Moment(
        weights=states.weights,
        gradients=states.buckets,
        optimizer=states.optimizer,
        activations=longest * measuring_bytes(shape, arithmetic, on_cpu=on_cpu),
        logits=logits,
    )


def measuring_bytes(shape: Shape, arithmetic: Arithmetic, *, on_cpu: bool) -> int:
    """Return bytes per token of a forward pass without gradients: at the peak of an MLP, of attention, or of the gated
    delta rule.
    """
    stream_bytes = hidden_states(shape, 1, arithmetic)
    number_bytes = product_bytes(arithmetic)
    queries = 4
    if shape.head_normed and number_bytes == BFLOAT16:
        queries += 1  # in float32
    mlp = 4 * stream_bytes + 3 * shape.intermediate * number_bytes
    attention = 3 * stream_bytes + (queries * shape.queries + 2 * shape.keys) * number_bytes
    delta = 0
    if shape.delta_layers:
        delta = 3 * stream_bytes + (8 * shape.delta_values + 5 * shape.delta_keys) * number_bytes
    if shape.delta_layers and on_cpu:
        # transformers' own code, in float32.
        delta = 3 * stream_bytes + (50 + number_bytes) * shape.delta_values
    return max(mlp, attention, delta)


def _head_gradient(shape: Shape, tuning: Tuning) -> int:
    """Return bytes of the gradient of the head, which is 0 if the head does not train."""
    return shape.embedding * FLOAT32 if trains_head(shape, tuning) else 0


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


def _held_on_cpu(shape: Shape, recipe: Recipe, tokens: int, arithmetic: Arithmetic) -> int:
    """Return bytes of freed tensors that the process holds on a CPU."""
    if arithmetic in ("float32", "casts"):
        return min(GIB, HELD_IN_FLOAT32 * shape.layers * tokens * shape.hidden)
    _, of_layer = layer_bytes(shape, recipe.tuning, arithmetic, on_cpu=True)
    return round(HELD_ON_CPU * of_layer * tokens)


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


def _states(shape: Shape, recipe: Recipe, weight_bytes: int, linear_bytes: float | None) -> States:
    """Return the states of a step. A weight of the base that is not quantized takes `weight_bytes`, and one that is
    stored quantized `linear_bytes`.
    """
    tuning = recipe.tuning
    shards = recipe.shards
    full = tuning.method == "full"
    if tuning.method == "qlora":
        linear_bytes = linear_bytes or NF4
    # Linear layers alone are quantized, without head or biases.
    quantized = shape.linear_weights if linear_bytes else 0
    base = round(quantized * (linear_bytes or 0) + (shape.parameters - quantized) * weight_bytes)
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
    """Return bytes of gradients that FSDP2 has not scattered yet: of a layer, and in float32 of the one before."""
    return shape.layer * (BFLOAT16 + FLOAT32)


def loss_bytes(shape: Shape, tokens: int, arithmetic: Arithmetic, *, on_cpu: bool, casts_head: bool = False) -> int:
    """Return bytes of a loss: a tile of logits, and the final hidden states with their gradients, once more in float32;
    also copies of the head in bfloat16 if the loss `casts_head`.
    """
    rows = min(shape.vocabulary, LOSS_TILE_VOCABULARY)
    # A tile of a small vocabulary is allocated whole too.
    tile = min(tokens, LOSS_TILE_TOKENS) * LOSS_TILE_VOCABULARY
    floats = 0
    if casts_head:
        # Copies of rows of the head: for this tile, and for the one before.
        copies = 2 if tokens > LOSS_TILE_TOKENS or shape.vocabulary > rows else 1
        tile += copies * rows * shape.hidden
    if on_cpu:
        copied = shape.hidden if casts_head else 0
        tile = (min(tokens, LOSS_TOKENS) + copied) * shape.vocabulary
        floats = 5 * FLOAT_LOGITS * FLOAT32
    states_and_gradients = 2 * hidden_states(shape, tokens, arithmetic) + tokens * shape.hidden * FLOAT32
    return tile * product_bytes(arithmetic) + floats + states_and_gradients


def _activations(shape: Shape, recipe: Recipe, tokens: int, arithmetic: Arithmetic, on_cpu: bool) -> tuple[int, int]:
    """Return bytes kept from the forward pass, and bytes used on top of them inside one layer."""
    training = recipe.training
    tuning = recipe.tuning
    # Chunks are those of dense MLPs.
    chunk = tokens if shape.experts else training.mlp_chunk_tokens or tokens
    mlp_share = min(1.0, chunk / tokens)
    kept_per_token, peak_per_token = layer_bytes(
        shape,
        tuning,
        arithmetic,
        context_parallel=recipe.hardware.context_parallel,
        mlp_share=mlp_share,
        on_cpu=on_cpu,
    )
    adapted_experts = 0.0
    if adapts_experts(shape, tuning):
        adapted_experts = ADAPTED_EXPERTS * shape.experts / shape.layers
    kept = kept_per_token * tokens + adapted_experts
    peak = peak_per_token * tokens + adapted_experts
    checkpoint: float = hidden_states(shape, tokens, arithmetic)
    if training.activation_checkpointing == "selective":
        share = (shape.full_layers + shape.sliding_layers) / shape.layers
        checkpoint += share * tokens * shape.queries * product_bytes(arithmetic)
    checkpointed = training.checkpointed_layers(shape.layers)
    resident = RESIDENT_WHEN_OFFLOADED if recipe.hardware.offload_activations else checkpointed
    sequences = training.per_device_batch_size
    attention = attention_bytes(shape, recipe.model.attention, tokens // sequences, arithmetic, on_cpu)
    of_layer = sequences * max(attention.full, attention.sliding)
    of_layers = sequences * (shape.full_layers * attention.full + shape.sliding_layers * attention.sliding)
    uncheckpointed = shape.layers - checkpointed
    # The first norm keeps the input of the layer if that is float32.
    layer_input = hidden_states(shape, tokens, arithmetic) if arithmetic in WIDE_STREAM else 0
    kept_in_all = resident * checkpoint + uncheckpointed * (layer_input + kept + of_layers / shape.layers)
    working = max(peak + of_layer, sequences * attention.peak)
    if not checkpointed:
        working -= kept + of_layer
    return round(kept_in_all + sequences * attention.masks), round(working)
