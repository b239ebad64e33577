"""What a model card says was measured, from the results that are kept with a run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pi_lora.card.kept import TUNED, Scores, kept_scores, tuned_stage
from pi_lora.run_folder import SCORES

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


def _perplexities(scores: Scores, windows: list[int]) -> list[str]:
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
