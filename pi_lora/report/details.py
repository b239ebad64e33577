"""What a page says of a run beside its card: the plan against what was used, the commands that made it, the recipe."""

from collections.abc import Iterator
from typing import NamedTuple

from pi_lora.errors import PiLoraError
from pi_lora.planning.memory import GIB
from pi_lora.planning.planning import CPU, GPUS, plan_recipe, target_of
from pi_lora.planning.text import hours_in_words
from pi_lora.recipe.files import dump_recipe
from pi_lora.report.run import Run, commands


class Details(NamedTuple):
    """Of one run: `use` has rows of a name, what was planned, and what was used."""

    name: str
    use: list[tuple[str, str, str]]
    commands: list[str]
    recipe: str


def details_of(run: Run) -> Details:
    """Return what a page says of a run; nothing of its plan where its base is not here."""
    return Details(run.name, list(_use(run)), list(commands(run)), dump_recipe(run.recipe))


def _use(run: Run) -> Iterator[tuple[str, str, str]]:
    used = run.made_with
    if used is None:
        return
    try:
        plan = plan_recipe(run.recipe, target_of(run.recipe), None if run.recipe.hardware.gpus else GPUS[CPU])
    except PiLoraError:  # gone, or on a hub that cannot be asked
        return
    if used.trainable_parameters:
        yield "trained parameters", f"{plan.trained:,}", f"{used.trainable_parameters:,}"
    yield "tokens", f"{plan.tokens:,}", f"{used.tokens:,}"
    yield "peak memory", f"{plan.memory.peak / GIB:.1f} GiB", f"{used.peak_memory / GIB:.1f} GiB"
    planned = hours_in_words(plan.hours) if plan.hours is not None else "not known"
    yield f"time ({plan.gpu.name} planned, {used.hardware} used)", planned, hours_in_words(used.seconds / 3600)
