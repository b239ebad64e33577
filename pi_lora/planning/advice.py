"""What to change when a recipe does not fit, or when there is room to be faster: found by planning the changes."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from pi_lora.planning.gpus import CPU
from pi_lora.planning.planning import Plan, plan_recipe
from pi_lora.recipe.schema import Recipe

Changes = Mapping[str, Any]
# A chunk is long enough to keep a GPU busy, and short compared with the windows that do not fit.
_MLP_IN_CHUNKS: Changes = {"training.mlp_chunk_tokens": 4096}
_OFFLOAD: Changes = {"hardware.offload_activations": True}
_ONE_AT_A_TIME: Changes = {"training.per_device_batch_size": 1}
# Undo what costs most time to save memory; activations that are not checkpointed are not offloaded either.
_FASTER: tuple[Changes, ...] = (
    {"training.activation_checkpointing": False, "hardware.offload_activations": False},
    {"hardware.offload_activations": False},
)
# How far a measured peak may lie above the planned one; room is what is left beyond it.
MARGIN = 1.15
GPUS_OF_A_MACHINE, MOST_MACHINES = 8, 16


def advice(plan: Plan) -> str | None:
    """Return the overrides of the cheapest change after which a plan fits, or None where none is known.

    Tried in this order, each alone and then with the three that cost only time: chunked MLPs, offloaded activations,
    one sequence at a time, QLoRA, more GPUs, a shorter target.
    """
    return next((overrides for overrides, changed in _replanned(plan, _changes(plan)) if changed.fits), None)


def faster(plan: Plan) -> tuple[str, Plan] | None:
    """Return the overrides after which a recipe takes less time and still fits, with `MARGIN` to spare, and their plan.

    None where activations are kept on the device already, or have no room there.
    """
    found = _replanned(plan, _FASTER)
    return next((each for each in found if each[1].memory.peak * MARGIN <= plan.gpu.memory), None)


def _changes(plan: Plan) -> Iterator[Changes]:
    # A chunk cannot repeat its dropout in the backward; a CPU's activations are in the host's memory already.
    chunks = {} if plan.recipe.tuning.dropout else _MLP_IN_CHUNKS
    offload = {} if plan.gpu.name == CPU else _OFFLOAD
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


def _replanned(plan: Plan, alternatives: Iterable[Changes]) -> Iterator[tuple[str, Plan]]:
    """Yield the overrides and plan of each change that the schema allows and that changes something."""
    for changes in alternatives:
        tree, overrides = plan.recipe.model_dump(mode="json"), []
        for key, value in changes.items():
            section, _, name = key.partition(".")
            if value != tree[section][name]:
                tree[section][name] = value
                overrides.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
        try:
            changed = Recipe.model_validate(tree)
        except ValidationError:
            continue
        if changed != plan.recipe:
            yield " ".join(overrides), plan_recipe(changed, plan.target, plan.gpu)
