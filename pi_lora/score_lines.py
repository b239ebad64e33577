"""What a model card says was measured, from the results that are kept with a run."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pi_lora.errors import ModelError
from pi_lora.run_folder import SCORES


def score_lines(folder: Path) -> Iterator[str]:
    """A line for each result, of those that were taken while training only for the last."""
    newest: dict[str, tuple[int, dict[str, Any]]] = {}
    for file in sorted((folder / SCORES).glob("*.json")):
        try:
            scores = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"{file}: is not JSON ({error}); measure again or remove it") from None
        name, step = file.stem.partition("-step-")[0], scores.get("step", -1)
        if name not in newest or newest[name][0] < step:
            newest[name] = (step, scores)
    for name, (step, scores) in newest.items():
        yield f"- {_score(name, scores)}" + (f" (step {step})" if step >= 0 else "")


def _score(name: str, scores: Mapping[str, Any]) -> str:
    """A result in words; the forms are those of the evaluations' JSON."""
    if "windows" in scores:
        found = ", ".join(f"{row['perplexity']:.3f} at {row['window']:,}" for row in scores["windows"])
        return f"**{name}**: perplexity {found} tokens; stride {scores['stride']}"
    if "k_max" in scores:
        reached = f"k_max {scores['k_max']:,} of {scores['target']:,} tokens"
        return f"**{name}**: passkey {reached}, {len(scores['depths'])} depths"
    if "tasks" in scores:
        found = ", ".join(f"{task} {each['acc']:.3f} ± {each['stderr']:.3f}" for task, each in scores["tasks"].items())
        return f"**{name}**: {found}"
    if "rougeL" in scores:
        rouge = ", ".join(f"{each} {scores[each]:.2f}" for each in ("rouge1", "rouge2", "rougeL"))
        return f"**{name}**: {rouge} over {scores['examples']:,} examples"
    return f"**{name}**: in `{SCORES}/{name}.json`"
