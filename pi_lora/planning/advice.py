"""What to change when a recipe does not fit, or when there is room to be faster: found by planning the changes."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from pi_lora.planning.gpus import CPU
from pi_lora.planning.planning import Plan, Target, plan_on, target_of
from pi_lora.recipe.schema import Recipe

Changes = Mapping[str, Any]
# A piece is long enough to keep a GPU busy, and short beside the windows that do not fit.
_MLP_IN_PIECES: Changes = {"training.mlp_chunk_tokens": 4096}
_OFFLOAD: Changes = {"hardware.offload_activations": True}
_ONE_AT_A_TIME: Changes = {"training.per_device_batch_size": 1}
# What costs most time to save memory, undone; activations that are not checkpointed are not offloaded either.
_FASTER: tuple[Changes, ...] = (
    {"training.activation_checkpointing": False, "hardware.offload_activations": False},
    {"hardware.offload_activations": False},
)
# How far a measured peak may lie above the planned one; room is what is left beyond it.
MARGIN = 1.15
GPUS_OF_A_MACHINE = 8
MOST_MACHINES = 16


def advice(plan: Plan) -> str | None:
    """The overrides of the cheapest change after which a plan that does not fit does; None where none is known.

    Tried in this order, each alone and then with the three that cost only time: MLPs in pieces, offloaded activations,
    one sequence at a time, QLoRA, more GPUs, a shorter target.
    """
    target = target_of(plan.recipe)
    for changes in _changes(plan.recipe, target, on_cpu=plan.gpu.name == CPU):
        changed = _changed(plan.recipe, changes)
        if changed and plan_on(changed, target, plan.gpu).fits:
            return _overrides(plan.recipe, changes)
    return None


def faster(plan: Plan) -> tuple[str, Plan] | None:
    """The overrides after which a recipe takes less time and still fits, with `MARGIN` to spare, and their plan.

    None where activations are kept on the device already, or have no room there.
    """
    target = target_of(plan.recipe)
    for changes in _FASTER:
        changed = _changed(plan.recipe, changes)
        if changed and (planned := plan_on(changed, target, plan.gpu)).memory.peak * MARGIN <= plan.gpu.memory:
            return _overrides(plan.recipe, changes), planned
    return None


def _changes(recipe: Recipe, target: Target, on_cpu: bool) -> Iterator[Changes]:
    # What dropout has dropped cannot be repeated piece by piece; a CPU's activations are in the host's memory already.
    pieces = {} if recipe.tuning.dropout else _MLP_IN_PIECES
    costs_time = {**pieces, **({} if on_cpu else _OFFLOAD), **_ONE_AT_A_TIME}
    yield from ({key: value} for key, value in costs_time.items())
    yield costs_time
    for changes in _costly_changes(recipe, target):
        yield changes
        yield {**costs_time, **changes}


def _costly_changes(recipe: Recipe, target: Target) -> Iterator[Changes]:
    if recipe.tuning.method != "qlora":
        yield {"tuning.method": "qlora"}
    yield from _more_gpus(recipe)
    shorter = recipe.context.target // 2
    while shorter > target.original:
        yield {"context.target": shorter}
        shorter //= 2


def _more_gpus(recipe: Recipe) -> Iterator[Changes]:
    """Twice as many, and twice again: up to a machine of eight, then machines; spread by weights, then by sequence."""
    gpus, machines = recipe.hardware.gpus, recipe.hardware.machines
    if gpus is None or recipe.tuning.method == "qlora":
        return
    while gpus * 2 <= GPUS_OF_A_MACHINE or machines * 2 <= MOST_MACHINES:
        if gpus * 2 <= GPUS_OF_A_MACHINE:
            gpus *= 2
        else:
            machines *= 2
        more = {"hardware.gpus": gpus, "hardware.machines": machines}
        yield more
        if gpus > recipe.hardware.context_parallel:
            yield {**more, "hardware.context_parallel": gpus}


def _changed(recipe: Recipe, changes: Changes) -> Recipe | None:
    """The recipe with some keys changed, or None where the schema refuses that or nothing changes."""
    tree = recipe.model_dump(mode="json")
    for key, value in changes.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    try:
        changed = Recipe.model_validate(tree)
    except ValidationError:
        return None
    return None if changed == recipe else changed


def _overrides(recipe: Recipe, changes: Changes) -> str:
    """Those of the changes that change something, as the command line takes them."""
    news = {key: value for key, value in changes.items() if value != _value(recipe, key)}
    return " ".join(f"{key}={_yaml(value)}" for key, value in news.items())


def _value(recipe: Recipe, key: str) -> Any:
    section, _, name = key.partition(".")
    return recipe.model_dump()[section][name]


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
