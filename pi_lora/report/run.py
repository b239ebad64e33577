"""A run with its scores, as reports read it."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pi_lora.errors import ModelError
from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.registry import MEASUREMENTS, read_scores
from pi_lora.models.stored import ADAPTER_CONFIG_FILE, read_adapter_settings, read_config
from pi_lora.recipe.files import RECIPE_FILE
from pi_lora.recipe.schema import Model
from pi_lora.run import BASE, STEP_0, TUNED, Provenance, Run
from pi_lora.scaling.config import method_of, scale_of, window_of

# The scores of one measurement by stage, in order: base, step 0, step 200, ..., tuned.
Stages = Mapping[str, Scores]


@dataclass(frozen=True)
class MeasuredRun(Run):
    """A run with its scores, or an adapter folder of other origin."""

    # Of an adapter that was merged: full weights with its config, and the base, if its folder does not say.
    merged: Path | None = None
    merged_with: str = ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config of the extended model."""
        return read_config(self.merged or self.path)

    @property
    def made_with(self) -> Provenance | None:
        """Cost, hardware and versions of a finished run; None if they are not known."""
        return self.provenance if self.provenance.tokens is not None else None

    @cached_property
    def base(self) -> Model:
        """The base of the adapter, or of full tuning."""
        if (self.path / ADAPTER_CONFIG_FILE).is_file():
            adapter = read_adapter_settings(self.path)
            name = adapter.base_model_name_or_path or self.merged_with or "unknown"
            return Model.model_construct(name=name, revision=adapter.revision or "main")
        return self.recipe.model

    @cached_property
    def original(self) -> int | None:
        """The original window (L, tokens) if it is known; under PI the config tells it too, for older runs."""
        if known := self.provenance.original or (self.recipe.context.original if self.has_recipe else None):
            return known
        return round(window_of(self.config) / scale_of(self.config)) if method_of(self.config) == "pi" else None

    @cached_property
    def scores(self) -> Mapping[str, Stages]:
        """Scores by measurement and stage, from `scores/NAME-base.json`, `NAME-step-N.json` and `NAME.json`."""
        by_stage: dict[str, dict[str, Scores]] = {}
        for name, stage, file in self.score_files():
            if scores := read_scores(file):
                by_stage.setdefault(name, {})[stage] = scores
        for stages in by_stage.values():
            if base := stages.get(BASE):
                relate = MEASUREMENTS[base.measurement].relate
                stages |= {key: relate(base, each) for key, each in stages.items() if type(each) is type(base)}
        return by_stage

    @property
    def last_scores(self) -> dict[str, Scores]:
        """The scores of the finished run, or else of the last step, by measurement."""
        last = {name: list(stages.items())[-1] for name, stages in self.scores.items()}
        return {name: scores for name, (stage, scores) in last.items() if stage != BASE}

    @property
    def own_scores(self) -> dict[str, Scores]:
        """The scores of the finished run by measurement."""
        return {name: stages[TUNED] for name, stages in self.scores.items() if TUNED in stages}

    @property
    def base_scores(self) -> dict[str, Scores]:
        """The scores of the base by measurement."""
        return {name: stages[BASE] for name, stages in self.scores.items() if BASE in stages}


def columns_of(runs: Sequence[MeasuredRun]) -> dict[str, dict[str, Scores]]:
    """Return what a table has side by side, by measurement: of one run the base, step 0, and the finished run or else
    the last step; of several runs the last scores of each.
    """
    if len(runs) > 1:
        return {run.name: run.last_scores for run in runs}
    columns: dict[str, dict[str, Scores]] = {}
    for name, stages in runs[0].scores.items():
        for stage, scores in stages.items():
            if stage in (BASE, STEP_0, list(stages)[-1]):
                columns.setdefault(stage, {})[name] = scores
    return {stage: columns[stage] for stage in sorted(columns, key=_stage_order)}


def measured_run(path: Path) -> MeasuredRun:
    """Return a run that was trained and measured; raise ModelError if it is none or a result cannot be read."""
    run = MeasuredRun(path)
    if not run.has_recipe:
        raise ModelError(f"{path}: holds no {RECIPE_FILE}; name a run folder that pi-lora train made")
    if not run.last_scores:
        raise ModelError(f"{path}: was not measured yet; measure it with: pi-lora eval all {shlex.quote(str(path))}")
    return run


def _stage_order(stage: str) -> float:
    """The number of a step; the base comes before, the finished run after all steps."""
    return {BASE: -1.0, TUNED: math.inf}.get(stage) or float(stage.removeprefix("step "))
