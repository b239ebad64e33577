"""A plan in words, for `pi-lora plan` and the first lines of every training; what to change when a recipe does not fit,
found by planning the changes; and the page of all recipes.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from pydantic import ValidationError

from pi_lora.planning.gpus import CPU, GIB
from pi_lora.planning.memory import OVERHEAD, OVERHEAD_ON_CPU
from pi_lora.planning.planning import ASSUMED_UTILIZATION, TrainingPlan, plan_recipe, plan_training
from pi_lora.recipe.files import load_recipe, recipe_paths, recipe_summary
from pi_lora.recipe.schema import Recipe

Changes = dict[str, Any]
# What saves memory and costs only time, the cheapest first. A chunk is long enough to keep a GPU busy, and short
# compared with the windows that do not fit.
_COSTS_TIME: tuple[tuple[str, Any], ...] = (
    *(("training.activation_checkpointing", value) for value in (4, 2, "selective", True)),
    ("training.mlp_chunk_tokens", 4096),
    ("hardware.offload_activations", True),
    ("training.per_device_batch_size", 1),
)
# Of one machine.
MORE_GPUS = (2, 4, 8)


def plan_lines(plan: TrainingPlan) -> list[str]:
    """Return what is tuned, what it needs, how long it takes; and what to change where it does not fit."""
    recipe, target, name = plan.recipe, plan.target, plan.recipe.model.name
    windows = f"{target.original} to {recipe.context.target} tokens"
    if recipe.scaling == "keep":
        windows = f"{target.original} tokens as it is, tuned for {recipe.context.target}"
    parameters = f"{_count(plan.trained)} parameters train"
    if recipe.tuning.method != "full":
        parameters += f"; {_count(target.shape.parameters)} are frozen"
    each = "each of " if recipe.hardware.processes > 1 else ""
    memory = f"{_gib(plan.memory.peak)} of {_gib(plan.gpu.memory)} GiB on {each}{machinery(plan)}"
    if plan.gpu.assumed:
        memory += f" ({plan.gpu.assumed})"
    if plan.memory.host:
        memory += f", {_gib(plan.memory.host)} GiB of its host, pinned in tensors of powers of two"
    duration = "no hours, since the peak of this device is not known"
    if plan.hours:
        duration = f"about {hours_in_words(plan.hours)} at {plan.utilization:.0%} of the peak (assumed)"
    steps = f"{recipe.training.steps} steps of {plan.tokens_per_step:,} tokens, {_count(plan.tokens)} in all"
    lines = [
        f"{name}: {windows}, {recipe.scaling}, {recipe.tuning.method}; {parameters}",
        f"memory: {memory}",
        f"time: {steps}, {sum(plan.flops):.1e} FLOPs: {duration}",
    ]
    if target.original != target.declared:
        said = f"{target.original} tokens, and the config of {name} says {target.declared}"
        lines.append(f"context.original: {said}; leave it out if that is right")
    if not plan.fits:
        place = f"on {plan.gpu.name}" if plan.memory.peak > plan.gpu.memory else "in the memory of the host"
        change = advice(plan)
        remedy = f"the cheapest change that fits: {change}" if change else "no suggested change fits"
        lines.append(f"it does not fit {place}; {remedy}")
    return lines


def component_lines(plan: TrainingPlan) -> list[tuple[str, str]]:
    """Return each component's name and the most that it takes; not all of them at the same moment."""
    parts = {**plan.memory.components, "overhead": plan.memory.overhead}
    return [(name, f"{size / GIB:.2f} GiB") for name, size in parts.items()]


def machinery(plan: TrainingPlan) -> str:
    """Return how many of which device, on how many machines."""
    hardware = plan.recipe.hardware
    machines = f" ({hardware.machines} machines)" if hardware.machines > 1 else ""
    return f"{hardware.processes} x {plan.gpu.name}{machines}"


def hours_in_words(hours: float) -> str:
    """Return hours rounded for reading: minutes below one hour, days above two days.

    >>> hours_in_words(0.001), hours_in_words(0.25), hours_in_words(7.6), hours_in_words(39.1), hours_in_words(100)
    ('a minute', '15 minutes', '7.6 hours', '39 hours', '4.2 days')
    """
    if hours < 1:
        minutes = round(hours * 60)
        return f"{minutes} minutes" if minutes > 1 else "a minute"
    if hours < 48:
        return f"{hours:.1f} hours" if hours < 10 else f"{hours:.0f} hours"
    return f"{hours / 24:.1f} days"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _count(number: int) -> str:
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def advice(plan: TrainingPlan) -> str | None:
    """Return the overrides of the cheapest change after which a plan fits, or None if no change here does.

    Tried in this order, each with ever more of what costs only time: nothing else, measuring afterwards, QLoRA, more
    GPUs of one machine, a shorter target.
    """
    recipe, shorter = plan.recipe, plan.recipe.context.target // 2
    changes: list[Changes] = [{}, {"evaluation.every": None}]
    if recipe.tuning.method != "qlora":
        changes.append({"tuning.method": "qlora"})
        for gpus in MORE_GPUS:
            # First the weights are spread over them, then the sequence too.
            if recipe.hardware.gpus and gpus > recipe.hardware.gpus:
                shared = {"hardware.context_parallel": gpus, "evaluation.every": None}
                changes += [{"hardware.gpus": gpus}, {"hardware.gpus": gpus, **shared}]
    while shorter > plan.target.original:
        changes.append({"context.target": shorter})
        shorter //= 2
    alternatives = (costs_time | change for change in changes for costs_time in slower(plan))
    return next((overrides for overrides, changed in replanned(plan, alternatives) if changed.fits), None)


def slower(plan: TrainingPlan) -> list[Changes]:
    """Return what saves memory and costs only time, each with all that costs less."""
    # A CPU's activations are in the host's memory already; a chunk cannot repeat its dropout in the backward.
    useless = {
        "hardware.offload_activations": plan.gpu.name == CPU,
        "training.mlp_chunk_tokens": plan.recipe.tuning.dropout,
    }
    useful = [(key, value) for key, value in _COSTS_TIME if not useless.get(key)]
    return [dict(useful[:number]) for number in range(len(useful) + 1)]


def replanned(plan: TrainingPlan, alternatives: Iterable[Changes]) -> Iterator[tuple[str, TrainingPlan]]:
    """Yield the overrides and plan of each change that the schema allows; no overrides where it changes nothing."""
    for changes in alternatives:
        tree, overrides = plan.recipe.model_dump(mode="json"), []
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if value != tree[section][name]:
                tree[section][name] = value
                overrides.append(f"{key}={json.dumps(value)}".replace('"', ""))
        with suppress(ValidationError):
            yield " ".join(overrides), plan_recipe(Recipe.model_validate(tree), plan.target, plan.gpu)


def recipes_page(folder: Path) -> str:
    """Return the Markdown page of a folder of recipes: a table for each folder, and what its figures rest on."""
    plans = {path: plan_training(load_recipe(path).recipe) for path in recipe_paths(folder)}
    recipes = [
        {
            "path": path.relative_to(folder),
            "summary": recipe_summary(path),
            "plan": plan,
            "paper": plan.recipe.paper or "",
        }
        for path, plan in plans.items()
    ]
    functions = {"machinery": machinery, "hours_in_words": hours_in_words}
    figures = {"gib": GIB, "overhead": OVERHEAD, "cpu": OVERHEAD_ON_CPU, "shares": ASSUMED_UTILIZATION}
    return render("recipes.md", name=Path(folder.name), recipes=recipes, **functions, **figures)


def render(template: str, **values: Any) -> str:
    """Return a page or recipe from a template of this folder."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, keep_trailing_newline=True, trim_blocks=True)
    return environment.get_template(template).render(values)
