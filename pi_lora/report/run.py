"""A run with its scores, as reports read it."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pi_lora.errors import ModelError
from pi_lora.evaluation.results import RulerScores, Scores, options_of, read_scores
from pi_lora.evaluation.ruler.effective import relative_to
from pi_lora.models.stored import ADAPTER_CONFIG_FILE, read_adapter_settings, read_config
from pi_lora.recipe.files import RECIPE_FILE
from pi_lora.recipe.schema import Model
from pi_lora.run import BASE, STEP_0, TUNED, Provenance, Run
from pi_lora.scaling.config import method_of, scale_of, window_of

# Results by stage, in order: base, step 0, 200, ..., tuned. None is JSON that pi-lora does not know.
Stages = Mapping[str, Scores | None]
S = TypeVar("S", bound=Scores)


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
        """Results by measurement and stage, from `scores/NAME-base.json`, `NAME-step-N.json` and `NAME.json`."""
        found: dict[str, dict[str, Scores | None]] = {}
        for name, stage, file in self.score_files():
            found.setdefault(name, {})[stage] = read_scores(file)
        if isinstance(base := found.get("ruler", {}).get(BASE), RulerScores):
            stages = found["ruler"].items()
            found["ruler"] = {stage: relative_to(base, x) if isinstance(x, RulerScores) else x for stage, x in stages}
        return found

    @property
    def results(self) -> dict[str, tuple[str, Scores | None]]:
        """The results of the tuned model by measurement, each with its stage: the finished run or the last step."""
        tuned = {name: [stage for stage in stages if stage != BASE] for name, stages in self.scores.items()}
        return {name: (stages[-1], self.scores[name][stages[-1]]) for name, stages in tuned.items() if stages}

    def main_stages(self, name: str, kind: type[S]) -> dict[str, S]:
        """Return a measurement of the base, of step 0 and of the tuned model, as far as there are results."""
        last, tuned = self.results.get(name, (TUNED, None))
        stages = {stage: self.scores.get(name, {}).get(stage) for stage in (BASE, STEP_0) if stage != last}
        return {stage: scores for stage, scores in {**stages, TUNED: tuned}.items() if isinstance(scores, kind)}

    def tuned(self, name: str, kind: type[S]) -> S | None:
        """Return a measurement of the tuned model."""
        return self.main_stages(name, kind).get(TUNED)


def own_scores(run: MeasuredRun) -> dict[str, Scores]:
    """Return the results of a finished run by measurement."""
    return {name: scores for name, (stage, scores) in run.results.items() if stage == TUNED and scores}


def base_scores(run: MeasuredRun, base: str, own: Mapping[str, Scores]) -> dict[str, Scores]:
    """Return the results that a run has of the model `base`, as far as they were made like its `own`."""
    kept = {name: stages.get(BASE) for name, stages in run.scores.items() if name in own}
    return {
        name: scores
        for name, scores in kept.items()
        if scores and scores.model == base and options_of(scores) == options_of(own[name])
    }


def measured_run(path: Path) -> MeasuredRun:
    """Return a run that was trained and measured; raise ModelError if it is none or a result cannot be read."""
    run = MeasuredRun(path)
    if not run.has_recipe:
        raise ModelError(f"{path}: holds no {RECIPE_FILE}; name a run folder that pi-lora train made")
    if not run.results:
        raise ModelError(f"{path}: was not measured yet; measure it with: pi-lora eval all {shlex.quote(str(path))}")
    return run


def missing_baselines(run: MeasuredRun) -> Iterator[str]:
    """Yield the commands that measure what the curves of a run are compared with: base and step 0."""
    for name in ("perplexity", "passkey", "ruler"):
        tuned = run.tuned(name, Scores)
        for stage in (BASE, *([STEP_0] if run.recipe.scaling != "direct" else [])):
            if stage not in run.scores.get(name, {}) and (command := _command(run, name, stage, tuned)):
                yield command


def commands(run: MeasuredRun) -> Iterator[str]:
    """Yield the commands that make a run and its scores again; those that it took while it trained come with it."""
    yield shlex.join(["pi-lora", "train", str(run.path / RECIPE_FILE), "--output", str(run.path)])
    for name, stages in run.scores.items():
        for stage in (BASE, STEP_0, TUNED):
            if command := _command(run, name, stage, stages.get(stage)):
                yield command


def _command(run: MeasuredRun, name: str, stage: str, like: Scores | None) -> str | None:
    """The command that measures a stage of a run as `like` was measured; None where no such scores are known."""
    if like is None or not (options := options_of(like)):
        return None
    if stage == STEP_0:
        target = {} if "targets" in options else {"target": options.get("target", run.recipe.context.target)}
        options |= {"original": run.original, **target, "scaling": run.recipe.scaling}
    model = str(run.path) if stage == TUNED else run.recipe.model.name
    words = ["pi-lora", "eval", like.command, model]
    for key, value in {**options, "json": run.scores_file(name, stage)}.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None and each is not False:
                text = ",".join(map(str, each)) if isinstance(each, tuple) else str(each)
                words += [f"--{key.replace('_', '-')}", *([] if each is True else [text])]
    return shlex.join(words)
