"""A plan in words, for `pi-lora plan` and the first lines of every training; and what to change when a recipe does not
fit, or when there is room to be faster, found by planning the changes.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template
from pydantic import ValidationError

from pi_lora.planning.memory import GIB, OVERHEAD, OVERHEAD_ON_CPU
from pi_lora.planning.planning import ASSUMED_UTILIZATION, CPU, GPUS, MIB, Gpu, Plan, plan_recipe, target_of
from pi_lora.recipe.files import load_recipe, recipe_paths, recipe_summary
from pi_lora.recipe.schema import Recipe
from pi_lora.types import NO_PERMISSIONS, Permissions

Changes = Mapping[str, Any]
# A chunk is long enough to keep a GPU busy, and short compared with the windows that do not fit.
MLP_IN_CHUNKS: Changes = {"training.mlp_chunk_tokens": 4096}
OFFLOAD: Changes = {"hardware.offload_activations": True}
_MEASURED_AFTERWARDS: Changes = {"evaluation.every": None}
_ONE_AT_A_TIME: Changes = {"training.per_device_batch_size": 1}
# Undo what costs most time to save memory; activations that are not checkpointed are not offloaded either.
_FASTER: tuple[Changes, ...] = (
    {"training.activation_checkpointing": False, "hardware.offload_activations": False},
    {"hardware.offload_activations": False},
)
GPUS_OF_A_MACHINE, MOST_MACHINES = 8, 16


def plan_lines(plan: Plan) -> list[str]:
    """Return what is tuned, what it needs, how long it takes; and what to change where it does not fit."""
    recipe, target = plan.recipe, plan.recipe.context.target
    windows = f"{plan.target.original} to {target} tokens"
    if recipe.scaling == "keep":
        what = "examples of at most" if recipe.data.has_examples else "tuned for"
        windows = f"{plan.target.original} tokens as it is, {what} {target}"
    trained = "all" if recipe.tuning.method == "full" else f"{_count(plan.trained)} beside"
    each = "each of " if recipe.hardware.processes > 1 else ""
    lines = [
        f"{recipe.model.name}: {windows}, {recipe.scaling}, "
        f"{recipe.tuning.method}; {trained} {_count(plan.target.shape.parameters)} parameters train",
        f"memory: {_gib(plan.memory.peak)} of {_gib(plan.gpu.memory)} GiB on {each}{machinery(plan)}"
        + (f", {_gib(plan.memory.host)} GiB of its host" if plan.memory.host else "")
        + (f"; {_gib(plan.memory.loading)} GiB of the first host to load it" if plan.memory.loading else ""),
        f"time: {recipe.training.steps} steps of {plan.tokens_per_step:,} tokens, {_count(plan.tokens)} in all, "
        f"{sum(plan.flops):.1e} FLOPs: {_duration(plan)}",
        *_evaluation_lines(plan),
    ]
    if not plan.fits:
        change = advice(plan)
        remedy = f"the cheapest change that fits: {change}" if change else "no change that is known here makes it fit"
        lines.append(f"it does not fit on {plan.gpu.name}; {remedy}")
    elif found := faster(plan):
        change, changed = found
        saved = 1 - sum(changed.flops) / sum(plan.flops)
        operations = f", {saved:.0%} fewer operations" if saved else ""
        lines.append(f"there is room to be faster: {change}: {_gib(changed.memory.peak)} GiB{operations}")
    return lines


def _evaluation_lines(plan: Plan) -> Iterator[str]:
    """Yield what measuring takes while the model trains, and of the finished run."""
    if plan.measuring:
        hours, times = plan.hours_of(plan.measuring), plan.measuring.times
        share = f", {hours / plan.hours:.0%} of the training" if hours is not None and plan.hours else ""
        taking = f"{_gib(plan.measuring.peak)} GiB, {times} times in {_measuring_time(plan, hours)}{share}"
        yield f"evaluation while training: {taking}"
    if after := plan.afterwards:
        hours, memory = plan.hours_of(after), f"{_gib(after.peak)} GiB"
        shared = _gib(after.peak + after.prefix)
        if after.peak > plan.gpu.memory:
            memory += f" (more than {plan.gpu.name} has)"
        elif shared != _gib(after.peak) and after.peak + after.prefix <= plan.gpu.memory:
            memory += f", or {shared} with passkey prompts that share what they begin with"
        without = ", without benchmarks" if plan.recipe.evaluation.benchmarks else ""
        yield f"evaluation afterwards, on one device: {memory}; {_measuring_time(plan, hours)}{without}"


def _measuring_time(plan: Plan, hours: float | None) -> str:
    if hours is not None:
        return f"about {hours_in_words(hours)}"
    why = "the peak of this device is not" if plan.gpu.peak is None else "the lengths of the documents are not"
    return f"no hours, since {why} known"


def _duration(plan: Plan) -> str:
    if plan.hours is None:
        return "no hours, since the peak of this device is not known"
    return f"about {hours_in_words(plan.hours)} at {plan.utilization:.0%} of the peak (assumed)"


def component_lines(plan: Plan) -> list[tuple[str, str]]:
    """Return each component's name and the most that it takes; not all of them at the same moment."""
    of_process = "overhead" if plan.gpu.name == CPU else "overhead (assumed)"
    parts = {**plan.memory.components, of_process: plan.memory.overhead}.items()
    return [(name, f"{_gib(size)} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB") for name, size in parts]


def gpu_named_in(text: str) -> Gpu | None:
    """Return the first device of the table that a text names, as the first line of a recipe does.

    >>> gpu_named_in("LLaMA-7B, 2k to 16k: QLoRA on one A100-80.").name
    'A100-80'
    """
    names = re.findall("|".join(rf"\b{name}\b" for name in sorted(GPUS, key=len, reverse=True) if name != CPU), text)
    return GPUS[names[0]] if names else None


def machinery(plan: Plan) -> str:
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


def advice(plan: Plan) -> str | None:
    """Return the overrides of the cheapest change after which a plan fits, or None where none is known.

    Tried in this order, each alone and then with the three that cost only time: measuring afterwards if training alone
    fits, chunked MLPs, offloaded activations, one sequence at a time, QLoRA, more GPUs, a shorter target.
    """
    return next((overrides for overrides, changed in replanned(plan, _changes(plan)) if changed.fits), None)


def faster(plan: Plan) -> tuple[str, Plan] | None:
    """Return the overrides after which a recipe takes less time and still fits, with memory to spare, and their plan.

    None where activations are kept on the device already, or have no room there.
    """
    found = replanned(plan, _FASTER)
    return next((each for each in found if each[0] and each[1].roomy), None)


def _changes(plan: Plan) -> Iterator[Changes]:
    # A chunk cannot repeat its dropout in the backward; a CPU's activations are in the host's memory already.
    if plan.memory.peak <= plan.gpu.memory:
        yield _MEASURED_AFTERWARDS
    chunks = {} if plan.recipe.tuning.dropout else MLP_IN_CHUNKS
    offload = {} if plan.gpu.name == CPU else OFFLOAD
    costs_time = {**chunks, **offload, **_ONE_AT_A_TIME}
    yield from ({key: value} for key, value in costs_time.items())
    yield costs_time
    for changes in _costly(plan):
        yield changes
        yield {**costs_time, **changes}


def _costly(plan: Plan) -> Iterator[Changes]:
    if plan.recipe.tuning.method != "qlora":
        yield {"tuning.method": "qlora"}
        yield from _more_gpus(plan.recipe)
    shorter = plan.recipe.context.target // 2
    while shorter > plan.target.original:
        yield {"context.target": shorter}
        shorter //= 2


def _more_gpus(recipe: Recipe) -> Iterator[Changes]:
    """Double the GPUs up to a machine of eight, then the machines; spread by weights, then by sequence."""
    gpus, machines = recipe.hardware.gpus, recipe.hardware.machines
    while gpus and (gpus * 2 <= GPUS_OF_A_MACHINE or machines * 2 <= MOST_MACHINES):
        if gpus * 2 <= GPUS_OF_A_MACHINE:
            gpus *= 2
        else:
            machines *= 2
        more = {"hardware.gpus": gpus, "hardware.machines": machines}
        yield more
        if gpus > recipe.hardware.context_parallel:
            yield {**more, "hardware.context_parallel": gpus}


def replanned(plan: Plan, alternatives: Iterable[Changes]) -> Iterator[tuple[str, Plan]]:
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


def planned(
    path: Path, overrides: Sequence[str] = (), gpu: Gpu | None = None, permissions: Permissions = NO_PERMISSIONS
) -> Plan:
    """Plan a recipe file on `gpu`, or else on the device that its first line names if it names one."""
    recipe = load_recipe(path, overrides).recipe
    return plan_recipe(recipe, target_of(recipe, permissions), gpu or gpu_named_in(recipe_summary(path)))


def recipes_page(folder: Path) -> str:
    """Return the Markdown page of a folder of recipes: a table for each folder, and what its figures rest on."""
    template = Template(Path(__file__).with_name("recipes.md").read_text(encoding="utf-8"), keep_trailing_newline=True)
    plans = [(path, planned(path)) for path in recipe_paths(folder)]
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
