"""The paper in small as a picture: perplexity and `k_max` by steps, for each target; needs matplotlib."""

from pathlib import Path
from typing import Any

from pi_lora.drawing import STYLES, new_figure, plain, round_levels, save
from small.page import SCALINGS, Result


def draw(result: Result, folder: Path, name: str) -> Path:
    """Write `folder/name.png`.

    Raises:
        DataError: the folder cannot be written.
    """
    return save(figure_of(result), folder / f"{name}.png")


def figure_of(result: Result) -> Any:
    """A column for each target, a curve for each way of extending."""
    targets = sorted({row["target"] for row in result["rows"]})
    figure = new_figure(3.7 * len(targets), 6.2)
    axes = figure.subplots(2, len(targets), squeeze=False, sharex=True)
    for (upper, lower), target in zip(axes.T, targets, strict=True):
        _column(upper, lower, [row for row in result["rows"] if row["target"] == target], target)
    axes[0][0].set_ylabel("perplexity (lower is better)")
    axes[1][0].set_ylabel("k_max (tokens)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside upper center", ncols=len(labels))
    return figure


def _column(upper: Any, lower: Any, rows: list[Result], target: int) -> None:
    for row, (colour, marker) in zip(rows, STYLES, strict=False):
        steps = [at["step"] for at in row["steps"]]
        style = {"color": colour, "marker": marker, "markersize": 5}
        label = f"{SCALINGS[row['scaling']]}, {row['method']}"
        upper.plot(steps, [at["perplexity"][str(target)] for at in row["steps"]], label=label, **style)
        lower.plot(steps, [at["k_max"] for at in row["steps"]], **style)
    upper.set(yscale="log", title=f"to {target:,} tokens")
    levels = round_levels(*upper.get_ylim())
    upper.set_yticks(levels, [f"{level:g}" for level in levels])
    upper.minorticks_off()
    lower.set(xlabel="step", ylim=(-0.04 * target, 1.04 * target))
    for each in (upper, lower):
        plain(each)
