"""Recipe to plan: memory of each device, tokens, operations and hours, from the shape of the model alone; and what to
change when a recipe does not fit, found by planning the changes.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from pi_lora.errors import ModelError, PiLoraError
from pi_lora.planning.gpus import CPU, Gpu, device_here
from pi_lora.planning.memory import memory
from pi_lora.planning.plan import Target, TrainingPlan
from pi_lora.planning.shape import Shape, flops_of_training, trained_parameters
from pi_lora.recipe.schema import Recipe
from pi_lora.scaling.config import Config, Extension, check_extendable, check_reach, window_of
from pi_lora.types import NO_PERMISSIONS, Permissions

# Config and shape of the hub models that the recipes name, so that these are planned offline and without torch.
CONFIGS = Path(__file__).parent / "configs"
BUILTIN_MODELS = Path(__file__).parents[1] / "builtin"
Changes = dict[str, object]
# What saves memory and costs only time, the cheapest first. A chunk is long enough to keep a GPU busy, and short
# compared with the windows that do not fit.
COSTS_TIME = (
    *(("training.activation_checkpointing", value) for value in (4, 2, "selective", True)),
    ("training.per_device_batch_size", 1),
    ("training.mlp_chunk_tokens", 4096),
    ("hardware.offload_activations", True),
)


def plan_training(recipe: Recipe, gpu: Gpu, permissions: Permissions = NO_PERMISSIONS) -> TrainingPlan:
    """Find the model of `recipe` and plan its training on `gpu`, as `plan_recipe` does; raise ScalingError if it cannot
    be extended as the recipe says.
    """
    name, context = recipe.model.name, recipe.context
    config, shape = find_shape(name, recipe.model.revision, permissions)
    window = window_of(config)
    original = context.original or window
    if recipe.scaling == "keep":
        check_reach(name, config, context.target)
    else:
        check_extendable(config, Extension(context.target, original, recipe.scaling, context.theta))
    return plan_recipe(recipe, Target(shape, original, window), gpu)


def plan_here(recipe: Recipe, permissions: Permissions = NO_PERMISSIONS) -> TrainingPlan | None:
    """Plan a training on this machine, whichever GPU the recipe names; None for a model that has no plan."""
    try:
        return plan_training(recipe, device_here(), permissions)
    except ModelError:
        return None


@cache
def find_shape(name: str, revision: str = "main", permissions: Permissions = NO_PERMISSIONS) -> tuple[Config, Shape]:
    """Return the config and shape of a model: a shipped one, a folder, or else a hub id."""
    shipped = shipped_config(name)
    # Another revision than the main one may have another shape.
    if revision == "main" and (shipped / "shape.json").is_file() and not os.path.isdir(name):
        config, shape = (json.loads((shipped / file).read_bytes()) for file in ("config.json", "shape.json"))
        return config, Shape(**shape)
    # Imported here: torch and transformers take seconds, and what is shipped does without.
    from pi_lora.models.model import find
    from pi_lora.planning.counting import shape_of

    model = find(name, permissions=permissions, revision=revision)
    return model.config, shape_of(model.meta_model)


def shipped_config(name: str) -> Path:
    """Return the folder where the config and shape of a hub or built-in model are shipped, if they are."""
    if name.startswith("builtin:"):
        return BUILTIN_MODELS / name.removeprefix("builtin:")
    return CONFIGS / name.replace("/", "--")


def plan_recipe(recipe: Recipe, target: Target, gpu: Gpu) -> TrainingPlan:
    """Plan `recipe` for a model on `gpu`; raise PiLoraError if that is a CPU, and the recipe asks for GPUs."""
    if gpu.name == CPU and recipe.hardware.gpus:
        raise PiLoraError("--gpu: cpu: the recipe asks for hardware.gpus; name a GPU, or set hardware.gpus=null")
    shape, tuning, training = target.shape, recipe.tuning, recipe.training
    tokens = recipe.data.tokens_per_sequence(target.original, recipe.context.target)
    needed = memory(shape, recipe, target.original, gpu)
    return TrainingPlan(
        recipe=recipe,
        target=target,
        gpu=gpu,
        trained=trained_parameters(shape, tuning),
        memory=needed,
        tokens_per_step=training.global_batch_size * tokens,
        flops=flops_of_training(shape, tuning, training, tokens, needed.plain_loss),
    )


def plan_lines(plan: TrainingPlan) -> list[str]:
    """Return a plan in words, and what to change where it does not fit."""
    lines = plan.lines()
    if not plan.fits:
        lines.append(f"it does not fit on {plan.gpu.name}; {advice(plan)}")
    return lines


def advice(plan: TrainingPlan) -> str:
    """Return the overrides of the cheapest change after which a plan fits, if one here does.

    Tried in this order, each with ever more of what costs only time: nothing else, measuring afterwards, QLoRA too, and
    PoSE too.
    """
    changes: list[Changes] = [{}]
    for key, value in (("evaluation.every", None), ("tuning.method", "qlora"), ("data.positions", "pose")):
        changes.append(changes[-1] | {key: value})
    alternatives = (costs_time | change for change in changes for costs_time in slower(plan))
    for overrides, changed in replanned(plan, alternatives):
        if changed.fits:
            return f"the cheapest change that fits: {overrides}"
    return "no suggested change fits; take a larger GPU, or several"


def slower(plan: TrainingPlan) -> list[Changes]:
    """Return what saves memory and costs only time, each with all that costs less."""
    # A CPU's activations are in the host's memory already.
    useful = COSTS_TIME[:-1] if plan.gpu.name == CPU else COSTS_TIME
    return [dict(useful[:number]) for number in range(len(useful) + 1)]


def replanned(plan: TrainingPlan, alternatives: Iterable[Changes]) -> Iterator[tuple[str, TrainingPlan]]:
    """Yield the overrides and plan of each change that the schema allows; no overrides where it changes nothing."""
    for changes in alternatives:
        tree, overrides = plan.recipe.model_dump(mode="json"), []
        for key, value in changes.items():
            section, name = key.split(".")
            if value != tree[section][name]:
                tree[section][name] = value
                overrides.append(f"{key}={json.dumps(value)}".replace('"', ""))
        with suppress(ValidationError):
            yield " ".join(overrides), plan_recipe(Recipe.model_validate(tree), plan.target, plan.gpu)
