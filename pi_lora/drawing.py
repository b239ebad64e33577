"""Colours, axes and files of all pictures; the only home of matplotlib."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

# Colours that the colour-blind tell apart (Okabe and Ito), each with its own marker for print.
BLUE, VERMILION, GREEN, ORANGE, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#999999"
STYLES = ((VERMILION, "o"), (GREY, "s"), (BLUE, "^"), (ORANGE, "D"), (GREEN, "v"), (PURPLE, "P"))
DOTS_PER_INCH = 120
# Inches of a panel; narrow enough that the letters can be read on a phone.
WIDTH, HEIGHT = 5.0, 3.7

# What draws on matplotlib axes.
Panel = Callable[[Any], None]
Curve = Sequence[tuple[float, float]]

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 10) -> str:
    """Return a curve as a line of at most `width` characters, from its lowest to its highest value. Each character is
    the mean of a group of values.

    >>> sparkline([4, 2, 1, 1.5]), sparkline([])
    ('█▃▁▂', '')
    """
    groups = min(width, len(values))
    bounds = [len(values) * index // groups for index in range(groups + 1)] if groups else []
    means = [fmean(values[first:last]) for first, last in pairwise(bounds)]
    bottom, top = min(means, default=0), max(means, default=0)
    scale = (len(BARS) - 1) / (top - bottom) if top > bottom else 0
    return "".join(BARS[round((mean - bottom) * scale)] for mean in means)


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of `width` and `height` inches, to be saved and never shown in a window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def figure_of(*panels: Panel, title: str = "", window: int | None = None) -> Any:
    """Return a figure of panels, two side by side, each with its legend above it, where it hides no curve, a line at
    the original `window` (tokens), and a title in small letters below.
    """
    rows, columns = -(-len(panels) // 2), min(2, len(panels))
    figure = new_figure(WIDTH * columns, HEIGHT * rows)
    if title:
        figure.supxlabel(fill(title, 80 * columns), fontsize=7)
    for part, panel in zip(figure.subfigures(rows, columns, squeeze=False).flat, panels, strict=False):
        axes = part.subplots()
        panel(axes)
        if axes.lines and window:
            axes.axvline(window, color="0.55", linestyle=":", linewidth=1.2, label="original window")
        plain(axes)
        if axes.get_legend_handles_labels()[0]:
            part.legend(frameon=False, loc="outside upper left", ncols=2, fontsize=10 if len(panels) == 1 else 8)
    return figure


def plain(axes: Any, title: str = "", **legend: Any) -> None:
    """Give axes a title, a faint grid, a frame at the left and bottom only, and a legend in the style of `legend`."""
    if title:
        axes.set_title(title, fontsize=11)
    if not axes.images:
        axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(**legend)


def draw_curves(curves: Mapping[str, Curve], axes: Any, **settings: Any) -> None:
    """Draw points by label as curves, each in a style of its own, on axes with these settings, such as labels."""
    for (label, points), (colour, marker) in zip(curves.items(), cycle(STYLES), strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, label=label)
    axes.set(**settings)


def draw_by_window(curves: Mapping[str, Curve], label: str, axes: Any) -> None:
    """Draw curves over windows in tokens, both axes logarithmic, with plain numbers."""
    from matplotlib.ticker import LogFormatter

    draw_curves(curves, axes, xscale="log", xlabel="window (tokens)", yscale="log", ylabel=label)
    ticks = sorted({window for points in curves.values() for window, _ in points})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter())


def save(figure: Any, file: Path) -> Path:
    """Write a figure whole or not at all, as a PNG under any file name. The same figure gives the same bytes."""
    part = file.with_name(f".{file.name}.part")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(part, format="png", dpi=DOTS_PER_INCH)
    part.replace(file)
    return file
