"""A run with its scores, as reports read it."""

import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pi_lora.errors import ModelError
from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.registry import read_scores
from pi_lora.models.files import ADAPTER_CONFIG_FILE, read_adapter_settings, read_config
from pi_lora.recipe.files import RECIPE_FILE
from pi_lora.recipe.schema import Model
from pi_lora.run import BASE, STEP_0, Run, check_finished
from pi_lora.scaling.config import method_of, scale_of, window_of


@dataclass(frozen=True)
class MeasuredRun(Run):
    """A run with its scores, or an adapter folder of other origin."""

    # Of an adapter that was merged: full weights with its config, and the base, if its folder does not say. Of a base
    # that was extended without tuning: the same folder as `path`, and the base.
    merged: Path | None = None
    merged_with: str = ""

    @property
    def untuned(self) -> bool:
        """Whether it is a base that was extended without tuning."""
        return self.merged == self.path

    @property
    def is_merged(self) -> bool:
        """Whether it is an adapter that was merged."""
        return self.merged is not None and not self.untuned

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config of the extended model."""
        return read_config(self.merged or self.path)

    @cached_property
    def base(self) -> Model:
        """The base of the adapter, or of full tuning."""
        if (self.path / ADAPTER_CONFIG_FILE).is_file():
            adapter = read_adapter_settings(self.path)
            name = adapter.base_model_name_or_path or self.merged_with or "unknown"
            return Model.model_construct(name=name, revision=adapter.revision or "main")
        return Model.model_construct(name=self.merged_with, revision="main") if self.untuned else self.recipe.model

    @cached_property
    def original(self) -> int | None:
        """The original window (L, tokens) if it is known; under PI the config tells it too, for older runs."""
        if known := self.provenance.original or (self.recipe.context.original if self.has_recipe else None):
            return known
        return round(window_of(self.config) / scale_of(self.config)) if method_of(self.config) == "pi" else None

    @cached_property
    def scores(self) -> dict[str, dict[str, Scores]]:
        """Scores by stage and measurement; the stages in order: base, step 0, step 200, ..., tuned."""
        stages: dict[str, dict[str, Scores]] = {}
        for stage, name, file in self.score_files():
            if scores := read_scores(file):
                stages.setdefault(stage, {})[name] = scores
        return stages

    @property
    def last_scores(self) -> dict[str, Scores]:
        """The scores of the finished run, or else of the last step, by measurement."""
        return {name: scores for stage in self.scores if stage != BASE for name, scores in self.scores[stage].items()}

    @property
    def columns(self) -> dict[str, dict[str, Scores]]:
        """The scores that tables and pictures show side by side: base, step 0, and the last of every measurement."""
        last, columns = self.last_scores, {}
        for stage, results in self.scores.items():
            always = stage in (BASE, STEP_0)
            if shown := {name: scores for name, scores in results.items() if always or scores is last[name]}:
                columns[stage] = shown
        return columns


def measured_run(path: Path) -> MeasuredRun:
    """Return a run that was trained and measured; raise ModelError if it is none or a result cannot be read."""
    check_finished(path)
    run = MeasuredRun(path)
    if not run.has_recipe:
        raise ModelError(f"{path}: holds no {RECIPE_FILE}; name a run folder that pi-lora train made")
    if not run.last_scores:
        raise ModelError(f"{path}: was not measured yet; measure it with: pi-lora eval all {shlex.quote(str(path))}")
    return run
