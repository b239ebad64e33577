"""Recipe to plan: memory of each device, tokens, operations and hours, from the shape of the model alone."""

from dataclasses import dataclass

from pi_lora.errors import PiLoraError
from pi_lora.planning.gpus import CPU, GPUS, Gpu
from pi_lora.planning.memory import OVERHEAD, DeviceMemory, memory, sequence_length, trained_parameters
from pi_lora.planning.operations import ASSUMED_UTILIZATION, ASSUMED_UTILIZATION_OF_CPU, Flops, flops_of_sequences
from pi_lora.planning.shape import Shape, find_shape
from pi_lora.recipe.schema import Recipe
from pi_lora.scaling.config import Interpolation, window_of
from pi_lora.scaling.extend import check_extendable, check_reach
from pi_lora.types import Json


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
