"""A plan in words: for `pi-lora plan`, and the first lines of every training."""

import re
from collections.abc import Sequence
from pathlib import Path

from pi_lora.planning.advice import advice, faster
from pi_lora.planning.gpus import CPU, GIB, GPUS, MIB, Gpu
from pi_lora.planning.memory import OVERHEAD
from pi_lora.planning.planning import ASSUMED_UTILIZATION, ASSUMED_UTILIZATION_OF_CPU, Plan, plan_recipe, target_of
from pi_lora.recipe.files import load_recipe, recipe_paths, recipe_summary


def plan_lines(plan: Plan) -> list[str]:
    """Return what is tuned, what it needs, how long it takes; and what to change where it does not fit."""
    recipe, target = plan.recipe, plan.recipe.context.target
    windows = f"{plan.target.original} to {target} tokens"
    if recipe.scaling == "keep":
        windows = f"{plan.target.original} tokens as it is, examples of at most {target}"
    trained = "all" if recipe.tuning.method == "full" else f"{_count(plan.trained)} beside"
    lines = [
        f"{recipe.model.name}: {windows}, {recipe.scaling}, "
        f"{recipe.tuning.method}; {trained} {_count(plan.parameters)} parameters train",
        f"memory: {_gib(plan.memory.peak)} of {_gib(plan.gpu.memory)} GiB on {'each of ' if plan.devices > 1 else ''}"
        f"{machinery(plan)}" + (f", {_gib(plan.memory.host)} GiB of its host" if plan.memory.host else ""),
        f"time: {recipe.training.steps} steps of {plan.tokens_per_step:,} tokens, {_count(plan.tokens)} in all, "
        f"{plan.flops.total:.1e} FLOPs: about {hours_in_words(plan.hours)} "
        f"at {plan.utilization:.0%} of the peak (assumed)",
    ]
    if not plan.fits:
        change = advice(plan)
        remedy = f"the cheapest change that fits: {change}" if change else "no change that is known here makes it fit"
        lines.append(f"it does not fit on {plan.gpu.name}; {remedy}")
    elif found := faster(plan):
        change, changed = found
        saved = 1 - changed.flops.total / plan.flops.total
        operations = f", {saved:.0%} fewer operations" if saved else ""
        lines.append(f"there is room to be faster: {change}: {_gib(changed.memory.peak)} GiB{operations}")
    return lines


def component_lines(plan: Plan) -> list[tuple[str, str]]:
    """Return each component's name and the most that it takes; not all of them at the same moment."""
    parts = {**plan.memory.components, "overhead (assumed)": OVERHEAD}.items()
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
    return f"{plan.devices} x {plan.gpu.name}{machines}"


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


_PAGE_HEADER = """\
# Recipes

Written by `pi-lora recipes --markdown`. Every figure is planned from a recipe and its model's config,
none is measured; `pi-lora plan RECIPE` says more, and plans for other hardware.
"""
_TABLE_HEADER = """
## {title}

| recipe | what it makes | hardware | memory of each | time | tokens | paper |
|---|---|---|---|---|---|---|
"""
_SHARES = ", ".join(f"{share:.0%} with {method}" for method, share in ASSUMED_UTILIZATION.items())
_ASSUMPTIONS = f"""
## What the figures rest on

Memory is each device's highest moment of a training step, with {OVERHEAD / GIB:.1f} GiB assumed for the
device's context and its libraries. Time is that of the training steps alone: no loading, evaluation or
saving. It assumes that a GPU reaches this share of its dense bfloat16 peak: {_SHARES};
and two CPU cores {ASSUMED_UTILIZATION_OF_CPU:.0%} of theirs. The share of full tuning lies between two
published runs, that of the CPU is the demo's; those of LoRA and QLoRA have no published run, so take their hours as
an order of magnitude.
"""


def planned(path: Path, overrides: Sequence[str] = (), gpu: Gpu | None = None) -> Plan:
    """Plan a recipe file on `gpu`, or else on the device that its first line names if it names one."""
    recipe = load_recipe(path, overrides).recipe
    return plan_recipe(recipe, target_of(recipe), gpu or gpu_named_in(recipe_summary(path)))


def recipes_page(folder: Path) -> str:
    """Return the Markdown page of a folder of recipes: a table for each folder, and what its figures rest on."""
    page = _PAGE_HEADER
    paths = recipe_paths(folder)
    for parent in sorted({path.parent for path in paths}):
        page += _TABLE_HEADER.format(title=Path(folder.name) / parent.relative_to(folder))
        for path in (each for each in paths if each.parent == parent):
            plan, relative = planned(path), path.relative_to(folder)
            page += f"| [{relative.with_suffix('')}]({relative}) | {recipe_summary(path)} | {machinery(plan)} "
            page += f"| {plan.memory.peak / GIB:.0f} of {plan.gpu.memory / GIB:.0f} GiB | {hours_in_words(plan.hours)} "
            page += f"| {plan.tokens / 1e6:,.0f} M | {plan.recipe.paper or ''} |\n"
    return page + _ASSUMPTIONS
