"""Scores as pictures; needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pi_lora.report.drawing import STYLES

Scores = Mapping[str, Any]


def comparison_picture(rows: Mapping[str, tuple[Scores, Scores]], original: int, file: Path) -> None:
    """Perplexity against window beside passkey success against distance, as a PNG; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for (name, (perplexity, passkey)), (colour, marker) in zip(rows.items(), STYLES, strict=False):
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
