"""Recipe to plan: memory of each device, tokens, operations and hours, from the shape of the model alone."""

from dataclasses import dataclass
from typing import NamedTuple

from pi_lora.errors import PiLoraError
from pi_lora.planning.gpus import CPU, GPUS, Gpu
from pi_lora.planning.memory import OVERHEAD, DeviceMemory, memory, sequence_length
from pi_lora.planning.shape import Shape, adapter_parameters, find_shape, trained_parameters
from pi_lora.recipe.schema import Recipe, Tuning
from pi_lora.scaling.config import Interpolation, window_of
from pi_lora.scaling.extend import check_extendable, check_reach
from pi_lora.types import Json

# Assumed: the share of a device's peak that a run reaches, recomputation counted as work. `full` lies between two
# published runs: Qwen3-8B at 1M tokens on 8 H100 (TRL's long-context guide: 380 s per step, 0.45) and LLaMA-7B at 64k
# on 8 A100 (EasyContext: 10,240 tokens/s, 0.50). None is published for LoRA or QLoRA at these lengths: LoRA adds small
# products and casts, QLoRA unpacks every weight three times. The CPU's share gives the demo's 760 steps the five
# minutes that they take on two cores.
ASSUMED_UTILIZATION = {"full": 0.45, "lora": 0.40, "qlora": 0.30}
ASSUMED_UTILIZATION_OF_CPU = 0.38


class Flops(NamedTuple):
    """Floating-point operations of each part of training; a multiplication and an addition count as two."""

    forward: float
    recomputation: float
    backward: float

    @property
    def total(self) -> float:
        """The sum of the three."""
        return self.forward + self.recomputation + self.backward


@dataclass(frozen=True)
class Target:
    """The model that a plan is for: its shape, and its window before it is extended (L) in tokens."""

    shape: Shape
    original: int


@dataclass(frozen=True)
class Plan:
    """What a recipe takes on one kind of device; memory is that of each device, `flops` those of the whole run."""

    recipe: Recipe
    target: Target
    gpu: Gpu
    trained: int
    memory: DeviceMemory
    tokens_per_step: int
    flops: Flops

    @property
    def devices(self) -> int:
        """Devices over all machines."""
        return self.recipe.hardware.processes

    @property
    def fits(self) -> bool:
        """Whether each device has the memory."""
        return self.memory.peak <= self.gpu.memory

    @property
    def tokens(self) -> int:
        """Tokens that the run trains on."""
        return self.tokens_per_step * self.recipe.training.steps

    @property
    def parameters(self) -> int:
        """Parameters of the base."""
        return self.target.shape.parameters

    @property
    def utilization(self) -> float:
        """The assumed share of the devices' peak."""
        on_cpu = self.gpu.name == CPU
        return ASSUMED_UTILIZATION_OF_CPU if on_cpu else ASSUMED_UTILIZATION[self.recipe.tuning.method]

    @property
    def hours(self) -> float:
        """Hours of training at the assumed utilization; loading, evaluation and saving come on top."""
        return self.flops.total / (self.gpu.peak * self.devices * self.utilization) / 3600

    def as_json(self) -> Json:
        """Return the plan as `--json` writes it."""
        return {
            "gpu": self.gpu.name,
            "gpus": self.devices,
            "machines": self.recipe.hardware.machines,
            "bytes": dict(self.memory.components),
            "overhead_bytes": OVERHEAD,
            "peak_bytes_per_gpu": self.memory.peak,
            "memory_bytes_per_gpu": self.gpu.memory,
            "host_bytes_per_gpu": self.memory.host,
            "fits": self.fits,
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "tokens_per_step": self.tokens_per_step,
            "tokens": self.tokens,
            "steps": self.recipe.training.steps,
            "flops": self.flops._asdict(),
            "assumed_utilization": self.utilization,
            "hours": self.hours,
        }


def target_of(recipe: Recipe) -> Target:
    """Find the model of `recipe`, build it on the meta device, and check that it can be extended as the recipe says."""
    config, shape = find_shape(recipe.model.name, recipe.model.revision, recipe.model.trust_remote_code)
    if recipe.scaling == "keep":
        check_reach(recipe.model.name, config, recipe.context.target)
        return Target(shape, window_of(config))
    original = recipe.context.original or window_of(config)
    check_extendable(config, Interpolation(recipe.scaling, original, recipe.context.target))
    return Target(shape, original)


def plan_recipe(recipe: Recipe, target: Target, gpu: Gpu | None = None) -> Plan:
    """Plan `recipe` on `gpu`, or on the smallest device of the table that fits it (the CPU without GPUs)."""
    if gpu is None:
        on_gpus = recipe.hardware.gpus is not None
        plans = [plan_recipe(recipe, target, each) for each in GPUS.values() if (each.name != CPU) == on_gpus]
        return next((plan for plan in plans if plan.fits), plans[-1])
    on_cpu = gpu.name == CPU
    if on_cpu and recipe.hardware.gpus is not None:
        raise PiLoraError("--gpu: cpu: the recipe asks for hardware.gpus; name a GPU, or set hardware.gpus=null")
    shape, training, tokens = target.shape, recipe.training, sequence_length(recipe, target.original)
    sequences = training.steps * training.global_batch_size
    return Plan(
        recipe=recipe,
        target=target,
        gpu=gpu,
        trained=trained_parameters(shape, recipe.tuning),
        memory=memory(shape, recipe, target.original, on_cpu),
        tokens_per_step=training.global_batch_size * tokens,
        flops=flops_of_sequences(shape, recipe.tuning, tokens, training.activation_checkpointing, sequences),
    )


def flops_of_sequences(shape: Shape, tuning: Tuning, tokens: int, checkpointing: bool, sequences: int = 1) -> Flops:
    """Return the operations of training on `sequences` of `tokens` each.

    A product with a weight costs 2 per token forward, 2 backward for its input, and 2 for its own gradient where it
    trains. Attention's two products are causal: half of `tokens` for each token. The chunked loss computes the logits
    again in its backward. Left out: norms, softmax, activation functions, state-space recurrences, the optimizer.
    """
    layers = (shape.linear_weights + shape.active_experts) * 2.0 * tokens
    head = shape.embedding * 2.0 * tokens
    adapter = adapter_parameters(shape, tuning) * 2.0 * tokens
    # 2 x 2 operations per channel for each pair of tokens in reach: queries with keys, and weights with values.
    window = min(shape.sliding_window, tokens)
    full, sliding = tokens * tokens / 2, tokens * window - window * window / 2
    attention = 4.0 * (shape.full_layers * full + shape.sliding_layers * sliding) * shape.queries
    forward = layers + head + adapter + attention
    recomputation = head + (layers + adapter + attention if checkpointing else 0.0)
    trained = layers + head if tuning.method == "full" else adapter
    backward = layers + head + adapter + 2 * attention + trained
    return Flops(forward * sequences, recomputation * sequences, backward * sequences)
