"""Scores to tables and pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

Scores = Mapping[str, Any]


def perplexity_table(scores: Scores) -> Table:
    """Perplexity by window."""
    table = Table(title=f"{scores['model']}: perplexity, {scores['documents']} documents of {scores['data']}")
    table.add_column("window", justify="right")
    table.add_column("perplexity", justify="right")
    table.add_column("tokens", justify="right")
    for row in scores["windows"]:
        table.add_row(str(row["window"]), f"{row['perplexity']:.3f}", f"{row['tokens']:,}")
    table.caption = (
        f"scale {scores['scale']:g}, stride {scores['stride']}, {scores['dtype']}, every token weighted equally"
    )
    return table


def passkey_table(scores: Scores) -> Table:
    """Success by depth, and k_max."""
    table = Table(title=f"{scores['model']}: passkey in {scores['target']} tokens, k_max {scores['k_max']}")
    table.add_column("k", justify="right")
    table.add_column("success", justify="right")
    table.add_column("")
    for row in scores["depths"]:
        rate = row["success_rate"]
        table.add_row(str(row["k"]), f"{rate:.0%}", "█" * round(rate * 20))
    table.caption = f"scale {scores['scale']:g}, {scores['depths'][0]['trials']} trials a depth, seed {scores['seed']}"
    return table


def comparison_table(rows: Mapping[str, tuple[Scores, Scores]]) -> Table:
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


def markdown_table(rows: Mapping[str, tuple[Scores, Scores]]) -> str:
    """`comparison_table` as Markdown."""
    windows = [row["window"] for row in next(iter(rows.values()))[0]["windows"]]
    lines = ["| model | " + " | ".join(f"perplexity at {window}" for window in windows) + " | k_max |"]
    lines.append("|---" * (len(windows) + 2) + "|")
    for name, (perplexity, passkey) in rows.items():
        found = " | ".join(f"{row['perplexity']:.2f}" for row in perplexity["windows"])
        lines.append(f"| {name} | {found} | {passkey['k_max']} |")
    return "\n".join(lines) + "\n"


def comparison_picture(rows: Mapping[str, tuple[Scores, Scores]], original: int, file: Path) -> None:
    """Perplexity against window beside passkey success against distance, as a PNG; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for (name, (perplexity, passkey)), (colour, marker) in zip(rows.items(), _styles(len(rows)), strict=True):
        windows = perplexity["windows"]
        style = {"color": colour, "marker": marker, "label": name, "markersize": 5}
        left.plot([row["window"] for row in windows], [row["perplexity"] for row in windows], **style)
        depths = passkey["depths"]
        right.plot([row["k"] for row in depths], [100 * row["success_rate"] for row in depths], **style)
    left.set(xscale="log", yscale="log", xlabel="window (tokens)", ylabel="perplexity (lower is better)")
    ticks = [row["window"] for row in next(iter(rows.values()))[0]["windows"]]
    left.set_xticks(ticks, [str(tick) for tick in ticks])
    low, high = left.get_ylim()
    levels = [level for level in (2, 5, 7, 10, 20, 50, 100, 200, 500, 1000) if low <= level <= high]
    left.set_yticks(levels, [str(level) for level in levels])
    left.minorticks_off()
    right.set(xlabel="passkey distance k (tokens)", ylabel="retrieved (%)", ylim=(-4, 104))
    for axes in (left, right):
        axes.axvline(original, color="0.6", linestyle=":", linewidth=1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_title("Language modeling", fontsize=11)
    right.set_title("Passkey retrieval", fontsize=11)
    left.legend(frameon=False, fontsize=9)
    right.annotate(
        "trained window", (original, 50), (4, 0), textcoords="offset points", rotation=90, va="center", color="0.4"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=160)
    pyplot.close(figure)


def _styles(number: int) -> Sequence[tuple[str, str]]:
    """Colours that the colour-blind tell apart (Okabe and Ito), each with a marker of its own for print."""
    return (("#D55E00", "o"), ("#999999", "s"), ("#0072B2", "^"), ("#E69F00", "D"), ("#009E73", "v"), ("#CC79A7", "P"))[
        :number
    ]
