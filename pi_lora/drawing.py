"""Colours, axes and files of all figures. Only this module draws with matplotlib."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from pi_lora.types import WRITTEN

# A palette for colour-blind readers (Okabe and Ito).
BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
ORANGE = "#E69F00"
PURPLE = "#CC79A7"
GREY = "#999999"
# Colours with markers, which tell curves apart in black and white.
STYLES = {
    "color": (VERMILION, GREY, BLUE, ORANGE, GREEN, PURPLE),
    "marker": ("o", "s", "^", "D", "v", "P"),
}
DOTS_PER_INCH = 120
# Inches of a panel, narrow enough that the letters can be read on a phone.
WIDTH = 5.0
HEIGHT = 3.7
# Characters of a line of text.
TEXT_COLUMNS = 80

# A function that draws on matplotlib axes.
Panel = Callable[[Any], None]
Curve = Sequence[tuple[float, float]]


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of `width` and `height` inches, which is saved and never shown on a screen."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def figure_of(*panels: Panel, title: str = "", window: int | None = None, most_columns: int = 2) -> Any:
    """Return a figure of panels in one or two columns, with a line at the original `window` (tokens), and the title in
    small letters at the bottom. The legend of a panel stands above it, so that it hides no curve.
    """
    columns = min(most_columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(WIDTH * columns, HEIGHT * rows)
    if title:
        figure.supxlabel(fill(title, 80 * columns), fontsize=7)
    legend_size = 10 if columns == 1 else 8
    parts = figure.subfigures(rows, columns, squeeze=False).flat
    for part, panel in zip(parts, panels, strict=False):
        axes = part.subplots()
        panel(axes)
        if axes.lines and window:
            axes.axvline(window, color="0.55", linestyle=":", linewidth=1.2, label="original window")
        plain(axes)
        if axes.get_legend_handles_labels()[0]:
            part.legend(frameon=False, loc="outside upper left", ncols=2, fontsize=legend_size)
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
    """Draw curves by label, in different styles, and apply `settings` such as axis labels to the axes."""
    axes.set_prop_cycle(**STYLES)
    for label, points in curves.items():
        coordinates = zip(*points, strict=True)
        axes.plot(*coordinates, markersize=5, label=label)
    axes.set(**settings)


def draw_marked_text(pieces: Sequence[tuple[str, float]], title: str, axes: Any) -> None:
    """Draw a text of `pieces`, with a background that is the stronger the greater the value of a piece is, up to 4."""
    from matplotlib.patches import Rectangle

    column = 0
    line = 0
    for piece, value in pieces:
        strength = min(1.0, max(0.0, value / 4))
        for character in piece:
            if character == "\n" or column == TEXT_COLUMNS:
                column = 0
                line += 1
            if character == "\n":
                continue
            if not character.isspace():
                background = Rectangle(
                    (column, line),
                    1,
                    1,
                    color=ORANGE,
                    alpha=strength,
                    linewidth=0,
                )
                axes.add_patch(background)
                axes.text(
                    column + 0.5,
                    line + 0.5,
                    character,
                    family="monospace",
                    fontsize=6,
                    ha="center",
                    va="center",
                )
            column += 1
    axes.set(
        xlim=(0, TEXT_COLUMNS),
        ylim=(line + 1, 0),
        xticks=[],
        yticks=[],
    )
    axes.set_title(title, fontsize=9)
    axes.spines[["left", "bottom"]].set_visible(False)


def draw_perplexities(curves: Mapping[str, Curve], axes: Any) -> None:
    """Draw perplexities by window in tokens, on logarithmic axes with plain numbers."""
    from matplotlib.ticker import LogFormatter

    draw_curves(
        curves,
        axes,
        xscale="log",
        xlabel="window (tokens)",
        yscale="log",
        ylabel="perplexity (lower is better)",
    )
    ticks = sorted({window for points in curves.values() for window, _ in points})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter())


def save(figure: Any, file: Path) -> Path:
    """Write a figure atomically as a PNG, under any file name. The same figure gives the same bytes."""
    part = file.with_name(f".{file.name}.part")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(part, format="png", dpi=DOTS_PER_INCH)
    part.replace(file)
    WRITTEN.append(file)
    return file
