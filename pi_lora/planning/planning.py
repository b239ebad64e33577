"""Recipe to plan: memory of each device, tokens, operations and hours, from the shape of the model alone."""

import json
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from pi_lora.errors import ModelError, PiLoraError
from pi_lora.planning.gpus import CPU, GPUS, Gpu, device_here, find_gpu
from pi_lora.planning.memory import MARGIN, DeviceMemory, memory
from pi_lora.planning.shape import Flops, Shape, flops_of_sequences, trained_parameters
from pi_lora.recipe.schema import Recipe
from pi_lora.scaling.config import Config, Interpolation, check_extendable, check_reach, window_of
from pi_lora.types import NO_PERMISSIONS, Json, Permissions

if TYPE_CHECKING:
    from pi_lora.models.model import Model

# Config and shape of the hub models that the recipes name, so that these are planned offline and without torch.
CONFIGS = Path(__file__).parent / "configs"
BUILTIN_MODELS = Path(__file__).parents[1] / "builtin"
# Assumed: the share of a device's peak that a run reaches, recomputation counted as work. `full` lies between two
# published runs: Qwen3-8B at 1M tokens on 8 H100 (TRL's long-context guide: 380 s per step, 0.45) and LLaMA-7B at 64k
# on 8 A100 (EasyContext: 10,240 tokens/s, 0.50). None is published for LoRA or QLoRA at these lengths: LoRA adds small
# products and casts, QLoRA unpacks every weight three times. The CPU's share gives the demo's 760 steps the five
# minutes that they take on two cores.
ASSUMED_UTILIZATION = {"full": 0.45, "lora": 0.40, "qlora": 0.30, "cpu": 0.38}


@dataclass(frozen=True)
class Target:
    """The model that a plan is for: its shape, its window before it is extended (L) in tokens, and the window that its
    config declares.
    """

    shape: Shape
    original: int
    declared: int


@dataclass(frozen=True)
class TrainingPlan:
    """What a recipe takes on one kind of device; memory is that of each device, `flops` those of the whole training."""

    recipe: Recipe
    target: Target
    gpu: Gpu
    trained: int
    memory: DeviceMemory
    tokens_per_step: int
    flops: Flops

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        memory = f"{self.memory.peak / 2**30:.1f} of {self.gpu.memory / 2**30:.1f} GiB"
        hours = "unknown" if self.hours is None else f"{self.hours:.1f}"
        return f"{self.gpu.name}: {verdict}, {memory}; {self.tokens:,} tokens, hours: {hours}"

    @property
    def fits(self) -> bool:
        """Whether each device has the memory, and its host, if that is known, what all devices pin."""
        return self.has_room(1)

    def has_room(self, margin: float = MARGIN) -> bool:
        """Return whether it fits with a `margin` of the memory of each device to spare."""
        pinned = self.memory.host * self.recipe.hardware.processes_per_machine
        return self.memory.peak * margin <= self.gpu.memory and (self.gpu.host is None or pinned <= self.gpu.host)

    @property
    def tokens(self) -> int:
        """Tokens that the run trains on."""
        return self.tokens_per_step * self.recipe.training.steps

    @property
    def utilization(self) -> float:
        """The assumed share of the devices' peak."""
        return ASSUMED_UTILIZATION[CPU if self.gpu.name == CPU else self.recipe.tuning.method]

    @property
    def hours(self) -> float | None:
        """Hours of training at the assumed utilization, if the device's peak is known; loading, evaluation and saving
        come on top.
        """
        in_float32 = self.recipe.computes_in(self.gpu.name == CPU, self.gpu.bfloat16) == "float32"
        peak = (in_float32 and self.gpu.float32_peak) or self.gpu.peak
        reached = peak and peak * self.utilization * self.recipe.hardware.processes
        return reached and sum(self.flops) / reached / 3600

    def as_json(self) -> Json:
        """Return the plan as `--json` writes it."""
        return {
            "gpu": self.gpu.name,
            "gpus": self.recipe.hardware.processes,
            "bytes": dict(self.memory.components),
            "peak_bytes_per_gpu": self.memory.peak,
            "host_bytes_per_gpu": self.memory.host,
            "fits": self.fits,
            "tokens_per_step": self.tokens_per_step,
            "steps": self.recipe.training.steps,
            "flops": self.flops._asdict(),
            "hours": self.hours,
        }


def plan_training(recipe: Recipe, gpu: Gpu | None = None, permissions: Permissions = NO_PERMISSIONS) -> TrainingPlan:
    """Find the model of `recipe` and plan its training on `gpu`, as `plan_recipe` does."""
    return plan_recipe(recipe, _target(recipe, *find_shape(recipe.model.name, recipe.model.revision, permissions)), gpu)


def plan_here(recipe: Recipe, model: "Model") -> TrainingPlan | None:
    """Plan a training on this machine, whichever GPU the recipe names; None for a model that has no plan."""
    from pi_lora.planning.counting import shape_of  # imports torch

    try:
        config = model.config if recipe.scaling == "keep" else model.base_config
        return plan_recipe(recipe, _target(recipe, config, shape_of(model.skeleton)), device_here(recipe))
    except ModelError:
        return None


def _target(recipe: Recipe, config: Config, shape: Shape) -> Target:
    """Return the model of a plan; raise ScalingError if it cannot be extended as the recipe says."""
    window = window_of(config)
    if recipe.scaling == "keep":
        check_reach(recipe.model.name, config, recipe.context.target)
        return Target(shape, window, window)
    original = recipe.context.original or window
    check_extendable(config, Interpolation(recipe.scaling, original, recipe.context.target, recipe.context.theta))
    return Target(shape, original, window)


@cache
def find_shape(name: str, revision: str = "main", permissions: Permissions = NO_PERMISSIONS) -> tuple[Config, Shape]:
    """Return the config and shape of a model: a shipped one, a folder, or else a hub id."""
    shipped = shipped_config(name)
    # Another revision than the main one may have another shape.
    if revision == "main" and (shipped / "shape.json").is_file() and not os.path.isdir(name):
        config, shape = ((shipped / file).read_text(encoding="utf-8") for file in ("config.json", "shape.json"))
        return json.loads(config), TypeAdapter(Shape).validate_json(shape)
    # Imported here: torch and transformers take seconds, and what is shipped does without.
    from pi_lora.models.model import find
    from pi_lora.planning.counting import shape_of

    model = find(name, permissions=permissions, revision=revision)
    return model.config, shape_of(model.skeleton)


def shipped_config(name: str) -> Path:
    """Return the folder where the config and shape of a hub or built-in model are shipped, if they are."""
    if name.startswith("builtin:"):
        return BUILTIN_MODELS / name.removeprefix("builtin:")
    return CONFIGS / name.replace("/", "--")


def plan_recipe(recipe: Recipe, target: Target, gpu: Gpu | None = None) -> TrainingPlan:
    """Plan `recipe` on `gpu`, else on its `hardware.gpu`, else on the smallest device of the table that fits it and has
    bfloat16 (the CPU without GPUs).
    """
    hardware, training = recipe.hardware, recipe.training
    if gpu is None and hardware.gpu:
        gpu = find_gpu(hardware.gpu, "hardware.gpu")
    if gpu is None:
        devices = [each for each in GPUS.values() if each.bfloat16] if hardware.gpus else [GPUS[CPU]]
        assumed = "assumed, since hardware.gpu names none"
        plans = [plan_recipe(recipe, target, replace(each, assumed=assumed)) for each in devices]
        return next((plan for plan in plans if plan.fits), plans[-1])
    if gpu.name == CPU and hardware.gpus:
        raise PiLoraError("--gpu: cpu: the recipe asks for hardware.gpus; name a GPU, or set hardware.gpus=null")
    shape, tokens = target.shape, recipe.data.tokens_per_sequence(target.original, recipe.context.target)
    sequences = training.steps * training.global_batch_size
    needed, selective = memory(shape, recipe, target.original, gpu), training.activation_checkpointing == "selective"
    recomputed = training.checkpointed_layers(shape.layers) / shape.layers
    return TrainingPlan(
        recipe=recipe,
        target=target,
        gpu=gpu,
        trained=trained_parameters(shape, recipe.tuning),
        memory=needed,
        tokens_per_step=training.global_batch_size * tokens,
        flops=flops_of_sequences(shape, recipe.tuning, tokens, recomputed, sequences, needed.plain_loss, selective),
    )
