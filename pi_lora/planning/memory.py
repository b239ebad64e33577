"""Memory of one device under a recipe, by component and at the moment of a training step when it is highest.

Left out: fragmentation of the allocator, sequences shorter than the longest, what evaluation and saving need on top.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pi_lora.planning.activations import eager_bytes, largest_linear, layer_bytes, loss_bytes, saved_inputs
from pi_lora.planning.gpus import GIB
from pi_lora.planning.parameters import (
    ADAMW_8BIT,
    ADAMW_MOMENTS,
    BFLOAT16,
    FLOAT32,
    base_bytes,
    count_parameters,
    head_trains,
)
from pi_lora.planning.shape import Shape
from pi_lora.recipe.schema import Recipe

# Assumed: the device's context, cuBLAS and NCCL workspaces; on a CPU the interpreter with its libraries.
OVERHEAD = round(1.5 * GIB)
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits")


@dataclass(frozen=True)
class Spread:
    """How a run lies on its devices: over how many each weight is cut, and what one of them computes at a time.

    `tokens` is what one device holds of `sequences` sequences of `sequence` tokens.
    """

    shards: int
    copies: int
    sequences: int
    sequence: int
    tokens: int
    accumulates: bool


def spread_of(recipe: Recipe, original: int) -> Spread:
    """FSDP2 cuts weights over all processes of a full or LoRA run on GPUs; NF4 weights and CPUs are plain copies.

    A sequence has L' tokens, or L of them with `data.positions: skip`.
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
    """Bytes on one device: the highest of each component, and of their sum, which not all of them share a moment of."""

    components: Mapping[str, int]
    highest: int

    @property
    def peak(self) -> int:
        """What the device must have: the highest sum, and the overhead."""
        return self.highest + OVERHEAD


def memory(
    shape: Shape, recipe: Recipe, spread: Spread, on_cpu: bool = False, bytes_a_number: int | None = None
) -> DeviceMemory:
    """Bytes on one device over a training step.

    Four moments are compared: the loss, the backward through the last layer (every saved input is still there), through
    the first (every gradient already is), and the optimizer's step. `bytes_a_number` is that of the base's weights, for
    a run that no recipe may ask for (bfloat16 weights that train).
    """
    fixed = _Fixed.of(shape, recipe, spread, bytes_a_number or _bytes_a_number(recipe, on_cpu))
    kept, working = _activations(shape, recipe, spread, fixed.wide_stream)
    loss = loss_bytes(shape, recipe.tuning, spread.tokens, fixed.wide_stream)
    early = fixed.gradients if spread.accumulates else fixed.head_gradient
    moments = (
        fixed.at(gradients=fixed.gradients if spread.accumulates else 0, activations=kept, logits=loss, casts=True),
        fixed.at(gradients=early, activations=kept + working, casts=not recipe.training.activation_checkpointing),
        fixed.at(gradients=fixed.gradients, activations=working + kept // shape.layers),
        fixed.at(gradients=fixed.gradients),
    )
    return DeviceMemory(
        {name: max(moment[name] for moment in moments) for name in COMPONENTS},
        max(sum(moment.values()) for moment in moments),
    )


@dataclass(frozen=True)
class _Fixed:
    """Bytes that do not depend on the tokens."""

    weights: int
    casts: int
    gradients: int
    head_gradient: int
    optimizer: int
    wide_stream: bool

    @classmethod
    def of(cls, shape: Shape, recipe: Recipe, spread: Spread, base_number: int) -> "_Fixed":
        tuning, count = recipe.tuning, count_parameters(shape, recipe.tuning)
        sharded = spread.shards > 1
        # The base itself trains in its own precision; what trains beside it is float32 (rule 4 of docs/design.md).
        trained_number = base_number if tuning.method == "full" else FLOAT32
        base = base_bytes(shape, tuning.method == "qlora", base_number)
        weights = (base + count.beside_the_base * FLOAT32) // spread.shards
        if sharded:
            weights += gathered_bytes(shape)
        gradients = count.trained * trained_number // spread.shards
        if sharded and tuning.method == "full":
            # Two layers' gradients before they are scattered, in bfloat16.
            gradients += 2 * shape.layer * BFLOAT16
        if spread.copies > 1:
            # DistributedDataParallel's buckets.
            gradients += count.trained * trained_number
        moments = ADAMW_8BIT if recipe.training.optimizer == "paged_adamw_8bit" else ADAMW_MOMENTS * trained_number
        return cls(
            weights=weights,
            casts=_autocast_bytes(shape, recipe, base_number, sharded),
            gradients=gradients,
            head_gradient=shape.embedding * trained_number // spread.shards if head_trains(shape, tuning) else 0,
            optimizer=round(count.trained * moments / spread.shards),
            wide_stream=base_number == FLOAT32 and not sharded,
        )

    def at(self, gradients: int, activations: int = 0, logits: int = 0, casts: bool = False) -> dict[str, int]:
        weights = self.weights + (self.casts if casts else 0)
        return dict(
            zip(COMPONENTS, (weights, gradients, self.optimizer, activations, logits), strict=True),
        )


def gathered_bytes(shape: Shape) -> int:
    """What FSDP2 has together in bfloat16 at once: the layer at work, the next one, and the head (accelerate 1.15)."""
    return (2 * shape.layer + shape.embedding) * BFLOAT16


def _bytes_a_number(recipe: Recipe, on_cpu: bool) -> int:
    """Of the base's weights: float32 where all of them train or on a CPU, else bfloat16, unless the recipe says."""
    full = recipe.tuning.method == "full"
    if recipe.model.dtype:
        return FLOAT32 if recipe.model.dtype == "float32" else BFLOAT16
    return FLOAT32 if full or on_cpu else BFLOAT16


def _autocast_bytes(shape: Shape, recipe: Recipe, base_number: int, sharded: bool) -> int:
    """Autocast's bfloat16 copies of float32 weights that train, kept until the forward pass ends."""
    if recipe.tuning.method != "full" or sharded or base_number != FLOAT32 or recipe.training.precision == "float32":
        return 0
    return shape.layers * shape.linear_weights * BFLOAT16


def _activations(shape: Shape, recipe: Recipe, spread: Spread, wide_stream: bool) -> tuple[int, int]:
    """Bytes kept from the forward pass, and bytes at work on top of them inside one layer."""
    kept_a_token, peak_a_token = layer_bytes(
        shape,
        recipe.tuning,
        wide_stream,
        spread.shards > 1,
        recipe.hardware.context_parallel,
        min(1.0, (recipe.training.mlp_chunk_tokens or spread.tokens) / spread.tokens),
    )
    # Float32 arithmetic keeps everything twice as wide.
    width = 2 if recipe.training.precision == "float32" else 1
    kept_in_layer, peak_in_layer = width * kept_a_token * spread.tokens, width * peak_a_token * spread.tokens
    if recipe.model.attention == "eager":
        scores = eager_bytes(shape, spread.sequences, spread.sequence)
        kept_in_layer, peak_in_layer = kept_in_layer + scores, peak_in_layer + scores
    if recipe.tuning.method == "qlora":
        peak_in_layer += largest_linear(shape) * BFLOAT16
    if recipe.training.activation_checkpointing:
        kept = saved_inputs(shape, spread.tokens, wide_stream, recipe.hardware.offload_activations)
        return kept, round(peak_in_layer)
    return round(shape.layers * kept_in_layer), round(peak_in_layer - kept_in_layer)


def host_bytes(shape: Shape, recipe: Recipe, spread: Spread) -> int:
    """Pinned host memory that offloading takes, for each device."""
    if not recipe.hardware.offload_activations:
        return 0
    return saved_inputs(shape, spread.tokens, wide_stream=False, offloaded=False)
