"""The results that are kept with a run: what was measured, and of what: the base, a step of the training, the end."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pi_lora.errors import ModelError
from pi_lora.run_folder import SCORES

Scores = Mapping[str, Any]

BASE, STEP_0, TUNED = "base", "step 0", "tuned"


def kept_scores(run: Path) -> dict[str, dict[str, Scores]]:
    """Results by measurement and stage, in order: `scores/NAME-base.json` of the base, `NAME-step-N.json`, `NAME.json`.

    The last is of the finished run. A file that holds no JSON object is left out.

    Raises:
        ModelError: a result cannot be read.
    """
    found: dict[str, dict[str, Scores]] = {}
    for file in sorted((run / SCORES).glob("*.json"), key=_order):
        scores = _read(file)
        name, stage, _ = _parts(file)
        if isinstance(scores, dict):
            found.setdefault(name, {})[stage] = scores
    return dict(sorted(found.items()))


def main_stages(stages: Mapping[str, Scores]) -> dict[str, Scores]:
    """Base, step 0, and what was tuned: the end, or the last step that was measured."""
    tuned = tuned_stage(stages)
    named = {stage: stages[stage] for stage in (BASE, STEP_0) if stage in stages and stage != tuned}
    return {**named, TUNED: stages[tuned]} if tuned else named


def tuned_stage(stages: Mapping[str, Scores]) -> str | None:
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
