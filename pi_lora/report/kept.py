"""The results that are kept with a run: what was measured, and of what: the base, a step of the training, the end."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_lora.errors import ModelError
from pi_lora.models.base import read_config
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.run_folder import RUN_FILE, SCORES, TRAINING_LOG, read_training_log
from pi_lora.scaling.config import Config, method_of, scale_of, window_of
from pi_lora.types import Json

BASE, STEP_0, TUNED = "base", "step 0", "tuned"


def kept_scores(run: Path) -> dict[str, dict[str, Json]]:
    """Results by measurement and stage, in order: `scores/NAME-base.json` of the base, `NAME-step-N.json`, `NAME.json`.

    The last is of the finished run. A file that holds no JSON object is left out.

    Raises:
        ModelError: a result cannot be read.
    """
    found: dict[str, dict[str, Json]] = {}
    for file in sorted((run / SCORES).glob("*.json"), key=_order):
        scores = _read(file)
        name, stage, _ = _parts(file)
        if isinstance(scores, dict):
            found.setdefault(name, {})[stage] = scores
    return dict(sorted(found.items()))


def main_stages(stages: Mapping[str, Json]) -> dict[str, Json]:
    """Base, step 0, and what was tuned: the end, or the last step that was measured."""
    tuned = tuned_stage(stages)
    named = {stage: stages[stage] for stage in (BASE, STEP_0) if stage in stages and stage != tuned}
    return {**named, TUNED: stages[tuned]} if tuned else named


def tuned_stage(stages: Mapping[str, Json]) -> str | None:
    """The stage that tells of the finished run: the end, or the last step; None if neither was measured."""
    return next((stage for stage in reversed(list(stages)) if stage != BASE), None)


def _order(file: Path) -> tuple[str, int]:
    return _parts(file)[0], _parts(file)[2]


def _parts(file: Path) -> tuple[str, str, int]:
    """Measurement, stage, and where the stage stands among the others."""
    if step := re.fullmatch(r"(.+)-step-(\d+)", file.stem):
        return step[1], f"step {step[2]}", int(step[2])
    if base := re.fullmatch(rf"(.+)-{BASE}", file.stem):
        return base[1], BASE, -1
    return file.stem, TUNED, 10**12


def _read(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: is not JSON ({error}); measure again or remove it") from None


@dataclass(frozen=True)
class RunResults:
    """A run: its recipe, `run.json`, results by measurement and stage (base, step 0, tuned), training log, and
    the window before stretching in tokens, as far as it is known.
    """

    path: Path
    recipe: Recipe
    made_with: Mapping[str, Any]
    scores: Mapping[str, Mapping[str, Json]]
    log: list[dict[str, Any]]
    original: int | None

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.path.resolve().name

    def tuned(self, measurement: str) -> Json | None:
        """What a measurement says of the finished run."""
        return self.scores.get(measurement, {}).get(TUNED)


def read_run(path: Path) -> RunResults:
    """Read a run.

    Raises:
        ModelError: it is no run folder, a result in it cannot be read, or nothing was measured.
    """
    if not (path / RECIPE_FILE).is_file():
        raise ModelError(f"{path}: holds no {RECIPE_FILE}; name a run folder that pi-lora train made")
    recipe = load_recipe(path / RECIPE_FILE).recipe
    scores = {name: main_stages(stages) for name, stages in kept_scores(path).items()}
    if not any(TUNED in stages for stages in scores.values()):
        raise ModelError(f"{path}: was not measured yet; measure it with: pi-lora eval all {path}")
    provenance = path / RUN_FILE
    made_with = json.loads(provenance.read_text(encoding="utf-8")) if provenance.is_file() else {}
    original = made_with.get("original") or recipe.context.original or _original(read_config(path))
    return RunResults(path, recipe, made_with, scores, read_training_log(path / TRAINING_LOG), original)


def missing_baselines(run: RunResults) -> Iterator[str]:
    """Commands that measure what the curves of a run should be seen beside: its base as it is, and stretched only."""
    for name in ("perplexity", "passkey"):
        tuned = run.tuned(name)
        for stage, suffix in ((BASE, BASE), (STEP_0, "step-0")):
            if tuned and stage not in run.scores[name] and not (stage == STEP_0 and run.recipe.scaling == "direct"):
                file = run.path / SCORES / f"{name}-{suffix}.json"
                options = [*_options(name, tuned), *(_stretched(run, tuned) if stage == STEP_0 else [])]
                yield " ".join(["pi-lora eval", name, run.recipe.model.name, *options, f"--json {file}"])


def _options(name: str, tuned: Json) -> list[str]:
    """What measures alike."""
    if name == "passkey":
        trials = max(row["trials"] for row in tuned["depths"])
        return [f"--target {tuned['target']} --depths {len(tuned['depths'])} --trials {trials} --seed {tuned['seed']}"]
    windows = ",".join(str(row["window"]) for row in tuned["windows"])
    chosen = {name: tuned.get(name.replace("-", "_")) for name in ("documents", "min-tokens", "truncate", "seed")}
    return [
        f"--data {tuned['data']} --windows {windows} --stride {tuned['stride']}",
        *(f"--{name} {value}" for name, value in chosen.items() if value is not None),
    ]


def _stretched(run: RunResults, tuned: Json) -> list[str]:
    original = [f"--original {run.original}"] if run.original else []
    target = [] if "target" in tuned else [f"--target {run.recipe.context.target}"]
    return [*original, *target, f"--scaling {run.recipe.scaling}"]


def _original(config: Config) -> int | None:
    """The window before stretching, which a config tells under PI; for runs from before `run.json` held it."""
    return round(window_of(config) / scale_of(config)) if method_of(config) == "pi" else None
