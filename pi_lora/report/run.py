"""A run folder as reports read it: recipe, config, provenance, scores by stage and training log, each read once."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pi_lora.errors import ModelError
from pi_lora.evaluation.results import PasskeyScores, PerplexityScores, Scores, read_scores
from pi_lora.models.base import ADAPTER_CONFIG_FILE, read_config
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.run_folder import RUN_FILE, SCORES, TRAINING_LOG, read_training_log
from pi_lora.scaling.config import method_of, scale_of, window_of

BASE, STEP_0, TUNED = "base", "step 0", "tuned"

# Results by stage, in order: base, step 0, 200, ..., tuned. None is JSON that pi-lora does not know.
Stages = Mapping[str, Scores | None]
S = TypeVar("S", bound=Scores)


class Base(NamedTuple):
    """The model that a run started from."""

    name: str
    revision: str


@dataclass(frozen=True)
class Run:
    """A run folder, or an adapter folder of other origin; each file is read once, when it is first asked for."""

    path: Path

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @property
    def has_recipe(self) -> bool:
        """Whether pi-lora trained it."""
        return (self.path / RECIPE_FILE).is_file()

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return load_recipe(self.path / RECIPE_FILE).recipe

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config of the extended model."""
        return read_config(self.path)

    @cached_property
    def made_with(self) -> dict[str, Any]:
        """What `run.json` holds: cost, hardware and versions; empty if there is none."""
        return _json(self.path / RUN_FILE)

    @cached_property
    def base(self) -> Base:
        """The base of the adapter, or of full tuning."""
        if adapter := _json(self.path / ADAPTER_CONFIG_FILE):
            return Base(adapter["base_model_name_or_path"], adapter.get("revision") or "main")
        return Base(self.recipe.model.name, self.recipe.model.revision)

    @cached_property
    def original(self) -> int | None:
        """The original window (L, tokens) if it is known; under PI the config tells it too, for older runs."""
        if known := self.made_with.get("original") or (self.recipe.context.original if self.has_recipe else None):
            return int(known)
        return round(window_of(self.config) / scale_of(self.config)) if method_of(self.config) == "pi" else None

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """The lines of `training.jsonl`."""
        return read_training_log(self.path / TRAINING_LOG)

    @cached_property
    def scores(self) -> Mapping[str, Stages]:
        """Results by measurement and stage, from `scores/NAME-base.json`, `NAME-step-N.json` and `NAME.json`."""
        found: dict[str, dict[str, Scores | None]] = {}
        for (name, _, stage), file in sorted((_parts(file), file) for file in (self.path / SCORES).glob("*.json")):
            found.setdefault(name, {})[stage] = read_scores(file)
        return found

    @property
    def results(self) -> dict[str, tuple[str, Scores | None]]:
        """The results of the tuned model by measurement, each with its stage: the finished run or the last step."""
        last = {name: _last(stages) for name, stages in self.scores.items()}
        return {name: (stage, self.scores[name][stage]) for name, stage in last.items() if stage}

    def main_stages(self, name: str, kind: type[S]) -> dict[str, S]:
        """Return a measurement of the base, of step 0 and of the tuned model, as far as there are results."""
        stages = self.scores.get(name, {})
        last = _last(stages)
        chosen = {**{stage: stage for stage in (BASE, STEP_0) if stage != last}, TUNED: last or TUNED}
        return {each: scores for each, stage in chosen.items() if isinstance(scores := stages.get(stage), kind)}

    def tuned(self, name: str, kind: type[S]) -> S | None:
        """Return a measurement of the tuned model."""
        return self.main_stages(name, kind).get(TUNED)


def measured_run(path: Path) -> Run:
    """Return a run that was trained and measured; raise ModelError if it is none or a result cannot be read."""
    run = Run(path)
    if not run.has_recipe:
        raise ModelError(f"{path}: holds no {RECIPE_FILE}; name a run folder that pi-lora train made")
    if not run.results:
        raise ModelError(f"{path}: was not measured yet; measure it with: pi-lora eval all {path}")
    return run


def missing_baselines(run: Run) -> Iterator[str]:
    """Yield the commands that measure what the curves of a run are compared with: base and step 0."""
    stages = {BASE: BASE} if run.recipe.scaling == "direct" else {BASE: BASE, STEP_0: "step-0"}
    for name in ("perplexity", "passkey"):
        tuned = run.tuned(name, Scores)
        for stage, suffix in stages.items():
            if tuned and stage not in run.scores[name]:
                options = _options(tuned, run if stage == STEP_0 else None)
                file = run.path / SCORES / f"{name}-{suffix}.json"
                yield " ".join(["pi-lora eval", name, run.recipe.model.name, *options, f"--json {file}"])


def _options(tuned: Scores, extended: Run | None) -> Iterator[str]:
    """The options that measure a base as `tuned` was measured; with the scaling of the run `extended`, if given."""
    if isinstance(tuned, PasskeyScores):
        trials = max(depth.trials for depth in tuned.depths)
        yield f"--target {tuned.target} --depths {len(tuned.depths)} --trials {trials} --seed {tuned.seed}"
    if isinstance(tuned, PerplexityScores):
        windows = ",".join(str(row.window) for row in tuned.windows)
        yield f"--data {tuned.data} --windows {windows} --stride {tuned.stride}"
        chosen = {key: getattr(tuned, key) for key in ("documents", "min_tokens", "truncate", "seed")}
        yield from (f"--{key.replace('_', '-')} {value}" for key, value in chosen.items() if value is not None)
    if extended:
        original = f"--original {extended.original} " if extended.original else ""
        target = "" if isinstance(tuned, PasskeyScores) else f"--target {extended.recipe.context.target} "
        yield f"{original}{target}--scaling {extended.recipe.scaling}"


def _last(stages: Stages) -> str | None:
    return next((stage for stage in reversed(list(stages)) if stage != BASE), None)


def _parts(file: Path) -> tuple[str, int, str]:
    """The measurement, the place of the stage among the others, and the stage that a file in `scores/` holds."""
    if step := re.fullmatch(r"(.+)-step-(\d+)", file.stem):
        return step[1], int(step[2]), f"step {step[2]}"
    if base := re.fullmatch(rf"(.+)-{BASE}", file.stem):
        return base[1], -1, BASE
    return file.stem, 10**12, TUNED


def _json(file: Path) -> dict[str, Any]:
    """The content of a JSON file that may be missing."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return content
