"""What was measured, as the hub reads it: the results of a card's `model-index`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from pi_lora.card.kept import Scores, kept_scores, tuned_stage


def eval_results(folder: Path) -> list[EvalResult]:
    """Every result of the tuned model that is kept in a run; what was measured of the base is not its own."""
    tuned = [(stages, tuned_stage(stages)) for stages in kept_scores(folder).values()]
    return [result for stages, stage in tuned if stage for result in _results(stages[stage])]


def _results(scores: Scores) -> Iterator[EvalResult]:
    if "windows" in scores:
        for row in scores["windows"]:
            about = f"perplexity at {row['window']} tokens, stride {scores['stride']}"
            yield _result(scores["data"], "perplexity", row["perplexity"], about)
    elif "k_max" in scores:
        yield _result(f"passkey retrieval in {scores['target']} tokens", "k_max", scores["k_max"], "k_max in tokens")
    elif "tasks" in scores:
        for task, found in scores["tasks"].items():
            yield _result(task, "accuracy", found["acc"], "accuracy, zero-shot")
    elif "rougeL" in scores:
        for name in ("rouge1", "rouge2", "rougeL"):
            yield _result(scores["data"], name, scores[name], name)


def _result(data: str, kind: str, value: float, name: str) -> EvalResult:
    dataset: dict[str, Any] = {"dataset_name": data, "dataset_type": _slug(data)}
    return EvalResult("text-generation", **dataset, metric_type=kind, metric_value=value, metric_name=name)


def _slug(name: str) -> str:
    """A name as the hub's own are written.

    >>> _slug("builtin:stdlib"), _slug("monology/pile-uncopyrighted")
    ('builtin-stdlib', 'monology/pile-uncopyrighted')
    """
    return re.sub(r"[^\w./-]+", "-", name).strip("-")
