"""A plan in words: for `pi-lora plan`, and the first lines of every training."""

import re

from pi_lora.plan.advice import advice, faster
from pi_lora.plan.gpus import CPU, GIB, GPUS, MIB, Gpu
from pi_lora.plan.memory import OVERHEAD
from pi_lora.plan.planning import Plan


def plan_lines(plan: Plan) -> list[str]:
    """What is tuned, what it needs, how long it takes; and what to change where it does not fit."""
    recipe = plan.recipe
    trained = "all" if recipe.tuning.method == "full" else f"{_count(plan.trained)} beside"
    lines = [
        f"{recipe.model.name}: {_windows(plan)}, {recipe.scaling}, "
        f"{recipe.tuning.method}; {trained} {_count(plan.parameters)} parameters train",
        f"memory: {_gib(plan.memory.peak)} of {_gib(plan.gpu.memory)} GiB on {'each of ' if plan.devices > 1 else ''}"
        f"{machinery(plan)}" + (f", {_gib(plan.host_bytes)} GiB of its host" if plan.host_bytes else ""),
        f"time: {recipe.training.steps} steps of {plan.tokens_per_step:,} tokens, {_count(plan.tokens)} in all, "
        f"{plan.flops.total:.1e} FLOPs: about {hours_in_words(plan.hours)} "
        f"at {plan.utilization:.0%} of the peak (assumed)",
    ]
    if not plan.fits:
        change = advice(plan)
        mend = f"the cheapest change that fits: {change}" if change else "no change that is known here makes it fit"
        lines.append(f"it does not fit on {plan.gpu.name}; {mend}")
    elif found := faster(plan):
        change, changed = found
        saved = 1 - changed.flops.total / plan.flops.total
        operations = f", {saved:.0%} fewer operations" if saved else ""
        lines.append(f"there is room to be faster: {change}: {_gib(changed.memory.peak)} GiB{operations}")
    return lines


def component_lines(plan: Plan) -> list[tuple[str, str]]:
    """Each component's name and the most that it takes; not all of them at the same moment."""
    parts = {**plan.memory.components, "overhead (assumed)": OVERHEAD}
    return [
        (name, f"{_gib(size)} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB") for name, size in parts.items()
    ]


def gpu_named_in(text: str) -> Gpu | None:
    """The first device of the table that a text names, as the first line of a recipe does.

    >>> gpu_named_in("LLaMA-7B, 2k to 16k: QLoRA on one A100-80.").name
    'A100-80'
    """
    names = re.findall("|".join(rf"\b{name}\b" for name in sorted(GPUS, key=len, reverse=True) if name != CPU), text)
    return GPUS[names[0]] if names else None


def machinery(plan: Plan) -> str:
    """How many of which device, on how many machines."""
    hardware = plan.recipe.hardware
    machines = f" ({hardware.machines} machines)" if hardware.machines > 1 else ""
    return f"{plan.devices} x {plan.gpu.name}{machines}"


def hours_in_words(hours: float) -> str:
    """Minutes below an hour, days above two days.

    >>> hours_in_words(0.001), hours_in_words(0.25), hours_in_words(7.6), hours_in_words(39.1), hours_in_words(100)
    ('a minute', '15 minutes', '7.6 hours', '39 hours', '4.2 days')
    """
    if hours < 1:
        minutes = round(hours * 60)
        return f"{minutes} minutes" if minutes > 1 else "a minute"
    if hours < 48:
        return f"{hours:.1f} hours" if hours < 10 else f"{hours:.0f} hours"
    return f"{hours / 24:.1f} days"


def _windows(plan: Plan) -> str:
    target = plan.recipe.context.target
    if plan.recipe.scaling == "keep":
        return f"{plan.original} tokens as it is, examples of at most {target}"
    return f"{plan.original} to {target} tokens"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _count(number: int) -> str:
    for unit, name in ((1e9, " B"), (1e6, " M")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:,}"
