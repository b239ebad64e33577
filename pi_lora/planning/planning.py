"""Recipe to plan: memory of each device, tokens, operations and hours, from the model's config alone."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_lora.errors import DataError, PiLoraError
from pi_lora.planning.gpus import CPU, GPUS, Gpu
from pi_lora.planning.memory import OVERHEAD, DeviceMemory, host_bytes, memory, spread_of
from pi_lora.planning.operations import Flops, flops_of_sequence, hours, utilization
from pi_lora.planning.parameters import count_parameters
from pi_lora.planning.shape import Shape, find_config, shape_of
from pi_lora.recipe.schema import Recipe
from pi_lora.scaling.config import Interpolation, window_of
from pi_lora.scaling.extend import check_extendable, check_reach

# What config.json files of LLaMA leave out, as transformers 5.23 completes them; the plan does not depend on theta.
DEFAULTS = {"rope_theta": 10000.0, "max_position_embeddings": 2048}


@dataclass(frozen=True)
class Target:
    """What is stretched: a model's shape, and the windows in tokens that it comes from and goes to.

    With `scaling: keep` the first is its own, and the second the longest example.
    """

    shape: Shape
    original: int
    target: int


@dataclass(frozen=True)
class Plan:
    """What a recipe takes on one kind of device; memory is each device's, `flops` the whole run's."""

    recipe: Recipe
    gpu: Gpu
    original: int
    parameters: int
    trained: int
    memory: DeviceMemory
    host_bytes: int
    tokens_per_step: int
    flops: Flops

    @property
    def devices(self) -> int:
        """Over all machines."""
        return self.recipe.hardware.processes

    @property
    def fits(self) -> bool:
        """Whether each device has them."""
        return self.memory.peak <= self.gpu.memory

    @property
    def tokens(self) -> int:
        """That the run trains on."""
        return self.tokens_per_step * self.recipe.training.steps

    @property
    def utilization(self) -> float:
        """The assumed share of the devices' peak."""
        return utilization(self.gpu, self.recipe.tuning)

    @property
    def hours(self) -> float:
        """Of training, at the assumed utilization; loading, evaluation and saving come on top."""
        return hours(self.flops.total, self.gpu, self.devices, self.recipe.tuning)

    def as_json(self) -> dict[str, Any]:
        """The plan as `--json` writes it."""
        return {
            "gpu": self.gpu.name,
            "gpus": self.devices,
            "machines": self.recipe.hardware.machines,
            "bytes": dict(self.memory.components),
            "overhead_bytes": OVERHEAD,
            "peak_bytes_per_gpu": self.memory.peak,
            "memory_bytes_per_gpu": self.gpu.memory,
            "host_bytes_per_gpu": self.host_bytes,
            "fits": self.fits,
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "tokens_per_step": self.tokens_per_step,
            "tokens": self.tokens,
            "steps": self.recipe.training.steps,
            "flops": {
                "forward": self.flops.forward,
                "recomputation": self.flops.recomputation,
                "backward": self.flops.backward,
            },
            "assumed_utilization": self.utilization,
            "hours": self.hours,
        }


def plan_recipe(recipe: Recipe, gpu: Gpu | None = None) -> Plan:
    """What `recipe` takes on `gpu`, or on the smallest device of the table that holds it (the CPU without GPUs).

    Raises:
        PiLoraError: a model without a plan, a scaling that cannot be extended, or a CPU for a recipe of GPUs.
    """
    target = target_of(recipe)
    if gpu is not None:
        return plan_on(recipe, target, gpu)
    if recipe.hardware.gpus is None:
        return plan_on(recipe, target, GPUS[CPU])
    plans = [plan_on(recipe, target, each) for each in GPUS.values() if each.name != CPU]
    return next((plan for plan in plans if plan.fits), plans[-1])


def target_of(recipe: Recipe) -> Target:
    """The model of `recipe`, by its config, and the windows it is stretched between.

    Raises:
        PiLoraError: a model without a plan, or a scaling that cannot be extended.
    """
    config = find_config(recipe.model.name, recipe.model.revision)
    shape = shape_of(config, recipe.model.name)
    config = {**DEFAULTS, **config}
    if recipe.scaling == "keep":
        check_reach(recipe.model.name, config, recipe.context.target)
        return Target(shape, window_of(config), recipe.context.target)
    original = recipe.context.original or window_of(config)
    interpolation = Interpolation(recipe.scaling, original, recipe.context.target)
    check_extendable(config, interpolation)
    return Target(shape, original, interpolation.target)


def plan_on(recipe: Recipe, target: Target, gpu: Gpu) -> Plan:
    """What `recipe` takes on `gpu`.

    Raises:
        PiLoraError: a CPU for a recipe that asks for GPUs.
    """
    on_cpu = gpu.name == CPU
    if on_cpu and recipe.hardware.gpus is not None:
        raise PiLoraError("--gpu: cpu: the recipe asks for hardware.gpus; name a GPU, or set hardware.gpus=null")
    shape, training = target.shape, recipe.training
    spread = spread_of(recipe, target.original)
    count = count_parameters(shape, recipe.tuning)
    one = flops_of_sequence(shape, recipe.tuning, spread.sequence, training.activation_checkpointing)
    sequences = training.steps * training.global_batch_size
    return Plan(
        recipe=recipe,
        gpu=gpu,
        original=target.original,
        parameters=count.base,
        trained=count.trained,
        memory=memory(shape, recipe, spread, on_cpu),
        host_bytes=host_bytes(shape, recipe, spread),
        tokens_per_step=training.global_batch_size * spread.sequence,
        flops=Flops(one.forward * sequences, one.recomputation * sequences, one.backward * sequences),
    )


def write_plan(plan: Plan, file: Path) -> None:
    """Write a plan as JSON.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        file.write_text(json.dumps(plan.as_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{file}: cannot be written ({error.strerror}); choose another file") from None
