"""Memory of one device under a recipe, by component and at the moment of a training step when it is highest.

Left out: fragmentation of the allocator, sequences shorter than the longest, what evaluation and saving need on top.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pi_lora.planning.activations import layer_bytes, loss_bytes, saved_inputs
from pi_lora.planning.gpus import GIB
from pi_lora.planning.parameters import BFLOAT16, FLOAT32, base_bytes, count_parameters, head_trains
from pi_lora.planning.shape import Shape
from pi_lora.recipe.schema import Recipe

# Assumed: the device's context, cuBLAS and NCCL workspaces; on a CPU the interpreter with its libraries.
OVERHEAD = round(1.5 * GIB)
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits")
# AdamW's two moments have the precision of what they are of; bitsandbytes' take a byte each, and a float32 scale for
# each 256. Paged ones may leave a full device, which is not counted on.
ADAMW_MOMENTS = 2
ADAMW_8BIT = 2 * (1 + 4 / 256)

# Bytes per pair of tokens and head: softmax in float32 and its bfloat16 copy, and one more of each in the backward.
EAGER_SCORE = 12


@dataclass(frozen=True)
class Spread:
    """How a run lies on its devices: each weight is cut over `shards`, of which there are `copies`.

    One device computes `sequences` of `sequence` tokens at a time, and holds `tokens` of them; it `accumulates` the
    gradients of several such steps.
    """

    shards: int
    copies: int
    sequences: int
    sequence: int
    tokens: int
    accumulates: bool


def spread_of(recipe: Recipe, original: int) -> Spread:
    """FSDP2 shards the weights of a full or LoRA run over all GPUs; NF4 weights and CPUs hold plain copies.

    A sequence has L' tokens, or L of them under PoSE (`data.positions: skip`).
    """
    training, hardware = recipe.training, recipe.hardware
    sharded = recipe.tuning.method != "qlora" and hardware.gpus is not None
    sequence = original if recipe.data.positions == "skip" else recipe.context.target
    return Spread(
        shards=hardware.processes if sharded else 1,
        copies=1 if sharded else hardware.processes,
        sequences=training.per_device_batch_size,
        sequence=sequence,
        tokens=training.per_device_batch_size * -(-sequence // hardware.context_parallel),
        accumulates=training.global_batch_size > training.per_device_batch_size * hardware.data_parallel,
    )


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device: the most of each component, and of their sum; they need not coincide."""

    components: Mapping[str, int]
    highest: int

    @property
    def peak(self) -> int:
        """What the device must have: the highest sum, and the overhead."""
        return self.highest + OVERHEAD


def memory(
    shape: Shape, recipe: Recipe, spread: Spread, on_cpu: bool = False, bytes_per_number: int | None = None
) -> DeviceMemory:
    """Return bytes on one device over a training step.

    Four moments are compared: the loss, the backward through the last layer (every saved input is still there), through
    the first (every gradient already is), and the optimizer's step. `bytes_per_number` is that of the base's weights,
    for runs that no recipe describes (bfloat16 weights that train).
    """
    base_number = bytes_per_number or _bytes_per_number(recipe, on_cpu)
    sharded, full = spread.shards > 1, recipe.tuning.method == "full"
    wide_stream = base_number == FLOAT32 and not sharded
    # The base itself trains in its own precision; what trains beside it is float32 (rule 4 of docs/design.md).
    trained_number = base_number if full else FLOAT32
    moment_bytes = ADAMW_8BIT if recipe.training.optimizer == "paged_adamw_8bit" else ADAMW_MOMENTS * trained_number

    weights = _weights(shape, recipe, spread, base_number)
    gradients = _gradients(shape, recipe, spread, trained_number)
    optimizer = round(count_parameters(shape, recipe.tuning).trained * moment_bytes / spread.shards)
    kept, working = _activations(shape, recipe, spread, wide_stream)
    logits = loss_bytes(shape, recipe.tuning, spread.tokens, wide_stream)
    # Autocast keeps bfloat16 copies of float32 weights that train until the forward pass ends.
    cast = full and wide_stream and recipe.training.precision != "float32"
    casts = (shape.linear_weights + shape.experts) * BFLOAT16 if cast else 0
    recast = 0 if recipe.training.activation_checkpointing else casts
    head_gradient = shape.embedding * trained_number // spread.shards if head_trains(shape, recipe.tuning) else 0
    accumulated, early = (gradients, gradients) if spread.accumulates else (0, head_gradient)
    moments = (
        (weights + casts, accumulated, optimizer, kept, logits),
        (weights + recast, early, optimizer, kept + working, 0),
        (weights, gradients, optimizer, working + kept // shape.layers, 0),
        (weights, gradients, optimizer, 0, 0),
    )
    most = map(max, zip(*moments, strict=True))
    return DeviceMemory(dict(zip(COMPONENTS, most, strict=True)), max(map(sum, moments)))


def _bytes_per_number(recipe: Recipe, on_cpu: bool) -> int:
    """Of the base's weights: float32 where all of them train or on a CPU, else bfloat16, unless the recipe says."""
    if recipe.model.dtype:
        return FLOAT32 if recipe.model.dtype == "float32" else BFLOAT16
    return FLOAT32 if recipe.tuning.method == "full" or on_cpu else BFLOAT16


def _weights(shape: Shape, recipe: Recipe, spread: Spread, base_number: int) -> int:
    count = count_parameters(shape, recipe.tuning)
    base = base_bytes(shape, recipe.tuning.method == "qlora", base_number)
    stored = (base + (count.adapter + count.copies) * FLOAT32) // spread.shards
    # FSDP2 gathers in bfloat16 the layer at work, the next one, and the head (accelerate 1.15).
    gathered = (2 * shape.layer + shape.embedding) * BFLOAT16 if spread.shards > 1 else 0
    return stored + gathered


def _gradients(shape: Shape, recipe: Recipe, spread: Spread, trained_number: int) -> int:
    whole = count_parameters(shape, recipe.tuning).trained * trained_number
    gradients = whole // spread.shards
    if spread.shards > 1 and recipe.tuning.method == "full":
        # Two layers' gradients before they are scattered, in bfloat16.
        gradients += 2 * shape.layer * BFLOAT16
    if spread.copies > 1:
        # DistributedDataParallel's buckets.
        gradients += whole
    return gradients


def _activations(shape: Shape, recipe: Recipe, spread: Spread, wide_stream: bool) -> tuple[int, int]:
    """Return bytes kept from the forward pass, and bytes at work on top of them inside one layer."""
    in_layer = layer_bytes(
        shape,
        recipe.tuning,
        wide_stream,
        gathered=spread.shards > 1,
        context_parallel=recipe.hardware.context_parallel,
        mlp_share=min(1.0, (recipe.training.mlp_chunk_tokens or spread.tokens) / spread.tokens),
    )
    # Float32 arithmetic keeps everything twice as wide.
    width = 2 if recipe.training.precision == "float32" else 1
    # The `eager` kernel alone materializes the attention weights of a layer.
    eager = spread.sequences if recipe.model.attention == "eager" else 0
    scores = eager * shape.heads * spread.sequence**2 * EAGER_SCORE
    kept_in_layer, peak_in_layer = (width * per_token * spread.tokens + scores for per_token in in_layer)
    if recipe.tuning.method == "qlora":
        # NF4 unpacks one linear layer at a time to bfloat16.
        peak_in_layer += max(linear.weights for linear in shape.linears) * BFLOAT16
    if recipe.training.activation_checkpointing:
        kept = saved_inputs(shape, spread.tokens, wide_stream, recipe.hardware.offload_activations)
        return kept, round(peak_in_layer)
    return round(shape.layers * kept_in_layer), round(peak_in_layer - kept_in_layer)
