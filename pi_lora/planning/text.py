"""A plan in words, for `pi-lora plan` and the first lines of every training; and what to change when a recipe does not
fit, or when there is room to be faster, found by planning the changes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Template
from pydantic import ValidationError

from pi_lora.planning.gpus import CPU, GIB
from pi_lora.planning.memory import OVERHEAD, OVERHEAD_ON_CPU
from pi_lora.planning.planning import ASSUMED_UTILIZATION, TrainingPlan, plan_recipe, plan_training
from pi_lora.recipe.files import load_recipe, recipe_paths, recipe_summary
from pi_lora.recipe.schema import Recipe

Changes = Mapping[str, Any]
# A chunk is long enough to keep a GPU busy, and short compared with the windows that do not fit.
MLP_IN_CHUNKS: Changes = {"training.mlp_chunk_tokens": 4096}
OFFLOAD: Changes = {"hardware.offload_activations": True}
# What saves memory and costs only time.
_COSTS_TIME: Changes = {**MLP_IN_CHUNKS, **OFFLOAD, "training.per_device_batch_size": 1}
# Undo what costs most time to save memory; activations that are not checkpointed are not offloaded either.
_FASTER: tuple[Changes, ...] = (
    {"training.activation_checkpointing": False, "hardware.offload_activations": False},
    {"hardware.offload_activations": False},
)
GPUS_OF_A_MACHINE = 8


def plan_lines(plan: TrainingPlan) -> list[str]:
    """Return what is tuned, what it needs, how long it takes; and what to change where it does not fit."""
    recipe, target = plan.recipe, plan.recipe.context.target
    windows = f"{plan.target.original} to {target} tokens"
    if recipe.scaling == "keep":
        windows = f"{plan.target.original} tokens as it is, tuned for {target}"
    frozen = plan.target.shape.parameters if recipe.tuning.method != "full" else 0
    parameters = f"{_count(plan.trained)} parameters train" + (f"; {_count(frozen)} are frozen" if frozen else "")
    each = "each of " if recipe.hardware.processes > 1 else ""
    duration = "no hours, since the peak of this device is not known"
    if plan.hours is not None:
        duration = f"about {hours_in_words(plan.hours)} at {plan.utilization:.0%} of the peak (assumed)"
    lines = [
        f"{recipe.model.name}: {windows}, {recipe.scaling}, {recipe.tuning.method}; {parameters}",
        f"memory: {_gib(plan.memory.peak)} of {_gib(plan.gpu.memory)} GiB on {each}{machinery(plan)}"
        + (f", {_gib(plan.memory.host)} GiB of its host" if plan.memory.host else "")
        + (f"; {_gib(plan.memory.loading)} GiB of the first host to load it" if plan.memory.loading else ""),
        f"time: {recipe.training.steps} steps of {plan.tokens_per_step:,} tokens, {_count(plan.tokens)} in all, "
        f"{sum(plan.flops):.1e} FLOPs: {duration}",
    ]
    if plan.measuring_hours:
        lines.append(f"evaluation: about {hours_in_words(plan.measuring_hours)} more, a rough figure, no benchmarks")
    if not plan.fits:
        change = advice(plan)
        remedy = f"the cheapest change that fits: {change}" if change else "no suggested change fits"
        lines.append(f"it does not fit on {plan.gpu.name}; {remedy}")
    elif found := faster(plan):
        change, changed = found
        saved = 1 - sum(changed.flops) / sum(plan.flops)
        operations = f", {saved:.0%} fewer operations" if saved else ""
        lines.append(f"there is room to be faster: {change}: {_gib(changed.memory.peak)} GiB{operations}")
    return lines


def component_lines(plan: TrainingPlan) -> list[tuple[str, str]]:
    """Return each component's name and the most that it takes; not all of them at the same moment."""
    of_process = "overhead" if plan.gpu.name == CPU else "overhead (assumed)"
    parts = {**plan.memory.components, of_process: plan.memory.overhead}
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

    Tried in this order, each alone and then with all that costs only time: measuring afterwards, chunked MLPs,
    offloaded activations, one sequence at a time, QLoRA, more GPUs of one machine, a shorter target.
    """
    return next((overrides for overrides, changed in replanned(plan, _changes(plan)) if changed.fits), None)


def faster(plan: TrainingPlan) -> tuple[str, TrainingPlan] | None:
    """Return the overrides after which a recipe takes less time and still fits, with memory to spare, and their plan.

    None where activations are kept on the device already, or have no room there.
    """
    return next((each for each in replanned(plan, _FASTER) if each[0] and each[1].roomy), None)


def _changes(plan: TrainingPlan) -> Iterator[Changes]:
    recipe, shorter = plan.recipe, plan.recipe.context.target // 2
    if recipe.evaluation.every:
        yield {"evaluation.every": None}
    # A CPU's activations are in the host's memory already; a chunk cannot repeat its dropout in the backward.
    excluded = {*(OFFLOAD if plan.gpu.name == CPU else ()), *(MLP_IN_CHUNKS if recipe.tuning.dropout else ())}
    costs_time = {key: value for key, value in _COSTS_TIME.items() if key not in excluded}
    yield from ({key: value} for key, value in costs_time.items())
    yield costs_time
    more: list[Changes] = []
    if recipe.tuning.method != "qlora":
        more.append({"tuning.method": "qlora"})
        gpus = recipe.hardware.gpus
        while gpus and gpus < GPUS_OF_A_MACHINE:
            gpus = min(2 * gpus, GPUS_OF_A_MACHINE)
            # First the weights are spread over them, then the sequence too.
            more += [{"hardware.gpus": gpus}, {"hardware.gpus": gpus, "hardware.context_parallel": gpus}]
    while shorter > plan.target.original:
        more.append({"context.target": shorter})
        shorter //= 2
    for changes in more:
        yield changes
        yield {**costs_time, **changes}


def replanned(plan: TrainingPlan, alternatives: Iterable[Changes]) -> Iterator[tuple[str, TrainingPlan]]:
    """Yield the overrides and plan of each change that the schema allows; no overrides where it changes nothing."""
    for changes in alternatives:
        tree, overrides = plan.recipe.model_dump(mode="json"), []
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if value != tree[section][name]:
                tree[section][name] = value
                overrides.append(f"{key}={json.dumps(value) if value is None or isinstance(value, bool) else value}")
        try:
            changed = Recipe.model_validate(tree)
        except ValidationError:
            continue
        yield " ".join(overrides), plan_recipe(changed, plan.target, plan.gpu)


def recipes_page(folder: Path) -> str:
    """Return the Markdown page of a folder of recipes: a table for each folder, and what its figures rest on."""
    template = Template(Path(__file__).with_name("recipes.md").read_text(encoding="utf-8"), keep_trailing_newline=True)
    plans = [(path, plan_training(load_recipe(path).recipe)) for path in recipe_paths(folder)]
    page: str = template.render(
        name=Path(folder.name),
        recipes=[
            {
                "path": path.relative_to(folder),
                "summary": recipe_summary(path),
                "plan": plan,
                "paper": plan.recipe.paper,
            }
            for path, plan in plans
        ],
        machinery=machinery,
        hours_in_words=hours_in_words,
        gib=GIB,
        overhead=OVERHEAD,
        cpu=OVERHEAD_ON_CPU,
        shares=ASSUMED_UTILIZATION,
    )
    return page
