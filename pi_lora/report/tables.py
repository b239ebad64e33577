"""Json as tables, on the terminal and in Markdown."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from rich.table import Table

from pi_lora.report.kept import TUNED, kept_scores, tuned_stage
from pi_lora.run_folder import SCORES
from pi_lora.types import Json


def comparison_table(rows: Mapping[str, tuple[Json, Json]]) -> Table:
    """Several models side by side: perplexity at every window, and k_max."""
    windows = [row["window"] for row in next(iter(rows.values()))[0]["windows"]]
    table = Table()
    table.add_column("model")
    for window in windows:
        table.add_column(f"ppl {window}", justify="right")
    table.add_column("k_max", justify="right")
    for name, (perplexity, passkey) in rows.items():
        found = [f"{row['perplexity']:.2f}" for row in perplexity["windows"]]
        table.add_row(name, *found, str(passkey["k_max"]))
    return table


def markdown_table(rows: Mapping[str, tuple[Json, Json]]) -> str:
    """`comparison_table` as Markdown."""
    windows = [row["window"] for row in next(iter(rows.values()))[0]["windows"]]
    lines = ["| model | " + " | ".join(f"perplexity at {window}" for window in windows) + " | k_max |"]
    lines.append("|---" * (len(windows) + 2) + "|")
    for name, (perplexity, passkey) in rows.items():
        found = " | ".join(f"{row['perplexity']:.2f}" for row in perplexity["windows"])
        lines.append(f"| {name} | {found} | {passkey['k_max']} |")
    return "\n".join(lines) + "\n"


PICTURES = "pictures"
# What each picture shows, for those who do not see it.
CAPTIONS = {
    "perplexity": "Perplexity against window",
    "passkey": "Passkeys retrieved against their distance",
    "loss": "Training loss against step",
}


def score_lines(folder: Path) -> Iterator[str]:
    """A line for each result of the tuned model, of those that were taken while training only for the last."""
    for name, stages in kept_scores(folder).items():
        if stage := tuned_stage(stages):
            yield f"- {_score(name, stages[stage])}" + (f" ({stage})" if stage != TUNED else "")


def stage_tables(folder: Path) -> Iterator[str]:
    """Perplexity and passkey of base, step 0 and what came of tuning side by side, where more than one was measured."""
    kept = kept_scores(folder)
    perplexity, passkey = kept.get("perplexity", {}), kept.get("passkey", {})
    if len(perplexity) > 1:
        windows = sorted({row["window"] for scores in perplexity.values() for row in scores["windows"]})
        yield markdown_rows(
            ["perplexity", *(f"{window:,} tokens" for window in windows)],
            [[stage, *_perplexities(scores, windows)] for stage, scores in perplexity.items()],
        )
    if len(passkey) > 1:
        yield markdown_rows(
            ["passkey", "k_max", "in a window of"],
            [[stage, f"{each['k_max']:,}", f"{each['target']:,} tokens"] for stage, each in passkey.items()],
        )


def picture_lines(folder: Path) -> Iterator[str]:
    """The pictures that lie in a folder."""
    for name, caption in CAPTIONS.items():
        if (folder / PICTURES / f"{name}.png").is_file():
            yield f"![{caption}]({PICTURES}/{name}.png)"


def markdown_rows(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown.

    >>> print(markdown_rows(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def _perplexities(scores: Json, windows: list[int]) -> list[str]:
    found = {row["window"]: row["perplexity"] for row in scores["windows"]}
    return [f"{found[window]:.2f}" if window in found else "" for window in windows]


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


def eval_results(folder: Path) -> list[EvalResult]:
    """Every result of the tuned model that is kept in a run; what was measured of the base is not its own."""
    tuned = [(stages, tuned_stage(stages)) for stages in kept_scores(folder).values()]
    return [result for stages, stage in tuned if stage for result in _results(stages[stage])]


def _results(scores: Json) -> Iterator[EvalResult]:
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
