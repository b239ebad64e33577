"""Several runs on one page: how each was made, what came of it, at which cost."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pi_lora.report.kept import RunResults
from pi_lora.report.tables import markdown_rows, picture_lines


def comparison_page(runs: Sequence[RunResults], folder: Path) -> str:
    """The page in Markdown; the pictures are those that lie in `folder`."""
    names = ", ".join(run.name for run in runs)
    parts = [f"# {len(runs)} runs side by side\n\n{names}.", _how_made(runs), *_measured(runs), *picture_lines(folder)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + f"\n\n{_caution(runs)}\n"


def _how_made(runs: Sequence[RunResults]) -> str:
    head = ["run", "base", "to", "scaling", "method", "steps", "tokens", "time", "on"]
    rows = []
    for run in runs:
        recipe, made = run.recipe, run.made_with
        cost = [f"{made['tokens']:,}", f"{made['seconds']:,.0f} s", made["hardware"]] if made else ["", "", ""]
        method = f"{recipe.tuning.method}" + (f", rank {recipe.tuning.rank}" if recipe.tuning.method != "full" else "")
        what = [f"`{recipe.model.name}`", f"{recipe.context.target:,}", f"`{recipe.scaling}`", method]
        rows.append([run.name, *what, f"{recipe.training.steps:,}", *cost])
    return markdown_rows(head, rows)


def _measured(runs: Sequence[RunResults]) -> Iterator[str]:
    """Perplexity at each window that any run was measured at, and k_max; empty where a run was not."""
    perplexities = {run.name: run.tuned("perplexity") for run in runs}
    found = {
        name: {row["window"]: row["perplexity"] for row in scores["windows"]} if scores else {}
        for name, scores in perplexities.items()
    }
    windows = sorted({window for each in found.values() for window in each})
    passkeys = {run.name: run.tuned("passkey") for run in runs}
    head = ["run", *(f"perplexity at {window:,}" for window in windows), "k_max"]
    yield markdown_rows(
        head,
        [
            [
                name,
                *(f"{each[window]:.2f}" if window in each else "" for window in windows),
                f"{passkey['k_max']:,} of {passkey['target']:,}" if (passkey := passkeys[name]) else "",
            ]
            for name, each in found.items()
        ],
    )


def _caution(runs: Sequence[RunResults]) -> str:
    """Whether the numbers compare, as far as the results tell."""
    sweeps = {(scores["data"], scores["stride"]) for run in runs if (scores := run.tuned("perplexity"))}
    if len(sweeps) > 1:
        ways = "; ".join(f"`{data}` with stride {stride}" for data, stride in sorted(sweeps))
        return f"Perplexities were measured in different ways and do not compare: {ways}."
    return "One run and one seed each."
