"""A plan in words, and the cheapest change to a recipe whose plan does not fit, found by planning the changes."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from pydantic import ValidationError

from pi_lora.planning.gpus import CPU
from pi_lora.planning.training_plan import TrainingPlan
from pi_lora.recipe.schema import Recipe

Changes = dict[str, object]
OFFLOAD_ACTIVATIONS = ("hardware.offload_activations", True)
CHUNKED_MLPS = ("training.mlp_chunk_tokens", 4096)
# Overrides that save memory and cost only time, the cheapest first. A chunk of tokens is long enough to keep a GPU
# busy, and short compared with the windows that do not fit.
MEMORY_SAVING_OVERRIDES = (
    ("training.activation_checkpointing", 4),
    ("training.activation_checkpointing", 2),
    ("training.activation_checkpointing", "selective"),
    ("training.activation_checkpointing", True),
    ("training.per_device_batch_size", 1),
    CHUNKED_MLPS,
    OFFLOAD_ACTIVATIONS,
)
# Overrides that change the run beyond the time that it takes, in the order in which they are tried.
QLORA = ("tuning.method", "qlora")
FURTHER_OVERRIDES = (
    ("evaluation.every", None),
    QLORA,
    ("data.positions", "pose"),
)


def plan_lines(plan: TrainingPlan) -> list[str]:
    """Return a plan in words, with the advised change if it does not fit."""
    lines = plan.lines()
    if not plan.fits:
        lines.append(f"it does not fit on {plan.gpu.name}; {advice(plan)}")
    return lines


def advice(plan: TrainingPlan) -> str:
    """Return the overrides of the cheapest change after which a plan fits, or that none of them does.

    Tried in this order, each with one more override that costs only time: nothing else, evaluation after training,
    QLoRA too, and PoSE too.
    """
    for overrides, changed_plan in replanned(plan, _alternatives(plan)):
        if changed_plan.fits:
            return f"the cheapest change that fits: {overrides}"
    return "no suggested change fits; take a larger GPU, or several"


def _alternatives(plan: TrainingPlan) -> Iterator[Changes]:
    """Yield the changes that `advice` tries, the cheapest first."""
    overrides = [change for change in FURTHER_OVERRIDES if change != QLORA or "qlora" in plan.model.methods]
    for number in range(len(overrides) + 1):
        further: Changes = dict(overrides[:number])
        for saving in memory_saving_changes(plan):
            yield saving | further


def memory_saving_changes(plan: TrainingPlan) -> list[Changes]:
    """Return the changes that save memory and cost only time: first none, then each with all cheaper ones."""
    overrides = list(MEMORY_SAVING_OVERRIDES)
    if plan.gpu.name == CPU:
        # The activations are in the memory of the host already.
        overrides.remove(OFFLOAD_ACTIVATIONS)
    if plan.model.shape.experts:
        overrides.remove(CHUNKED_MLPS)
    return [dict(overrides[:number]) for number in range(len(overrides) + 1)]


def replanned(plan: TrainingPlan, alternatives: Iterable[Changes]) -> Iterator[tuple[str, TrainingPlan]]:
    """Yield the overrides and the plan of every change that the schema allows.

    A key whose value stays the same is left out of the overrides.
    """
    for changes in alternatives:
        tree = plan.recipe.model_dump(mode="json")
        overrides = []
        for key, value in changes.items():
            section, name = key.split(".")
            if value != tree[section][name]:
                tree[section][name] = value
                overrides.append(f"{key}={json.dumps(value)}".replace('"', ""))
        with suppress(ValidationError):
            recipe = Recipe.model_validate(tree)
            yield " ".join(overrides), replace(plan, recipe=recipe)
