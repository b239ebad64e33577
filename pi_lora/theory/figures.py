"""The bounds, and how far a model stays below them, as tables and figures."""

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from pi_lora.drawing import BLUE, GREEN, GREY, VERMILION, new_figure, plain, save
from pi_lora.theory.bounds import Bounds, Fit, Setting, attention_score, fit_noise, frequencies, partial_sums
from pi_lora.theory.heads import Attention, distances

# Figure 2's second row: what is added to the sum of squares; the fit stays as close to the points as without.
RIDGE = 10.0
DOTS, FEWEST_DOTS = 48, 6  # of figure 1 in all, and inside the window
SAMPLES = 4096  # of a curve
FEW = 50  # distances between which figure 2 looks
DISTANCE = "positional difference $s$ (tokens)"


def bounds_table(setting: Setting, bounds: Bounds) -> Table:
    """Return section 2.3 in numbers: as the paper states it, and as it holds."""
    table = Table(
        Column(""),
        Column("paper", justify="right"),
        Column("holds for every h", justify="right"),
        title=f"d {setting.head_dim}, c {setting.theta:g}, L {setting.original}, L' {setting.target}",
        caption=f"B(s)/d is at least {bounds.lowest:.4g} on all whole s in [0, {setting.target}] "
        f"(at {bounds.lowest_at}); H is max_j |h_j|",
    )
    table.add_row("interpolation, |a - a_linear|", f"d H / {bounds.papers_divisor:.2f}", f"d H / {bounds.divisor:.2f}")
    table.add_row("extrapolation, |a|", "2 H B(s)", "2 H B(s)")
    table.add_row("their ratio if B(s) = d", f"{bounds.papers_factor:.1f}", f"{bounds.factor:.1f}")
    table.add_row("their ratio where B(s) is least", f"{bounds.papers_ratio:.1f}", f"{bounds.ratio:.1f}")
    return table


def attention_table(found: Attention) -> Table:
    """Return the largest scores of each layer, over its heads."""
    columns = (
        ("H", "coefficient", ".1f"),
        ("|a| inside", "inside", ".1f"),
        ("|a| beyond", "beyond", ".1f"),
        ("of its bound", "beyond_share", ".0%"),
        ("|a - line|", "between", ".2f"),
        ("of its bound", "between_share", ".0%"),
        ("of Eqn. 5", "papers_share", ".0%"),
    )
    table = Table(
        *(Column(name, justify="right") for name in ("layer", *(heading for heading, _, _ in columns))),
        title=f"{found.model}: scores of {found.pairs} queries and keys a head, {found.tokens} tokens of {found.text}",
        caption="the largest over heads, pairs and distances; shares are of the bound for the same pair and distance",
    )
    for layer, group in groupby(found.heads, key=lambda each: each.layer):
        heads = list(group)
        largest = (format(max(getattr(each, key) for each in heads), form) for _, key, form in columns)
        table.add_row(str(layer), *largest)
    return table


def draw_theory(setting: Setting, folder: Path) -> list[Path]:
    """Write `positions`, `fit` and `bound` as PNG and SVG; raise DataError if the folder cannot be written."""
    figures = {"positions": _positions, "fit": _fit, "bound": _bound}
    return [file for name, draw in figures.items() for file in save(draw(setting), folder, name)]


def draw_attention(found: Attention, setting: Setting, folder: Path) -> list[Path]:
    """Write `measured` as PNG and SVG; raise DataError if the folder cannot be written."""
    figure = new_figure(12, 8)
    (growth, beyond), (between, curve) = figure.subplots(2, 2)
    _heat_map(growth, found, "growth", "Beyond the window / inside: largest |a|, of one pair")
    _heat_map(beyond, found, "beyond_share", "Beyond the window: |a| / extrapolation bound")
    _heat_map(between, found, "between_share", "In between: |a - a_linear| / interpolation bound")
    _example(curve, found, setting)
    figure.suptitle(f"{found.model}, {found.pairs} queries and keys a head from {found.tokens} tokens", fontsize=11)
    return save(figure, folder, "measured")


def _positions(setting: Setting) -> Any:
    """Figure 1: where positions fall on the wave of one rotary pair: as trained, extrapolated, interpolated."""
    figure = new_figure(10, 4.6)
    above, below = figure.subplots(2, 1, sharex=True)
    length, target = setting.original, setting.target
    # Of the waves there are, the one that turns about twice within the window.
    speeds = frequencies(setting.head_dim, setting.theta)
    speed = speeds[np.abs(np.log(speeds * length / (4 * np.pi))).argmin()]
    wave = np.linspace(0, target, SAMPLES)
    for axes in (above, below):
        axes.axvspan(0, length, color=GREY, alpha=0.15, linewidth=0)
        axes.plot(wave, np.sin(wave * speed), color="0.6", linewidth=1)
        axes.set(xlim=(-target / 100, target), ylim=(-1.35, 1.9), yticks=(-1, 0, 1), ylabel="rotary wave")
    step = length / max(FEWEST_DOTS, round(DOTS * length / target))
    positions = np.arange(0, target, step)
    squeezed = positions * length / target
    on_the_grid = np.isclose(squeezed / step, np.round(squeezed / step))
    dots = (
        (above, positions[positions < length], BLUE, "o", f"trained, below {length}"),
        (above, positions[positions >= length], VERMILION, "X", f"unseen, up to {target}"),
        (below, squeezed[on_the_grid], BLUE, "o", "as trained"),
        (below, squeezed[~on_the_grid], GREEN, "D", "in between"),
    )
    for axes, at, colour, marker, label in dots:
        axes.plot(at, np.sin(at * speed), color=colour, marker=marker, label=label, linestyle="none", markersize=4.5)
    below.set_xlabel("position index (tokens)")
    titles = {
        "Extrapolation: position indices leave the trained range": above,
        f"Position Interpolation: indices are multiplied by {length}/{target}": below,
    }
    for title, axes in titles.items():
        _finish(axes, title, setting)
        axes.legend(frameon=False, fontsize=9, loc="upper right", ncols=2)
    return figure


def _fit(setting: Setting) -> Any:
    """Figure 2: a score fitted to noise inside the window, beyond it and in between; by least squares, and by ridge."""
    figure = new_figure(13, 6.8)
    rows = figure.subplots(2, 3)
    for axes, ridge, name in zip(rows, (0.0, RIDGE), ("least squares", f"ridge, {RIDGE:g}"), strict=True):
        fit = fit_noise(setting.head_dim, setting.theta, setting.original, ridge)
        _inside(axes[0], fit, name)
        _beyond(axes[1], fit, setting)
        _between(axes[2], fit)
    for axes, title in zip(
        rows[0], ("Fitted in $[0, L)$", "Effect of extrapolation", "Effect of interpolation"), strict=True
    ):
        axes.set_title(title, fontsize=11)
    for axes in rows[-1]:
        axes.set_xlabel(DISTANCE)
    return figure


def _inside(axes: Any, fit: Fit, name: str) -> None:
    s = np.arange(len(fit.points), dtype=float)
    # Thousands of dots are one bitmap in the SVG.
    axes.scatter(s, fit.points, s=4, color=BLUE, alpha=0.35, linewidth=0, rasterized=True, label="points")
    axes.plot(s, fit.at(s), color=VERMILION, linewidth=1.5, label=name)
    axes.set_ylabel("attention score $a(s)$")
    _finish(axes)
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=9, loc="upper right")


def _beyond(axes: Any, fit: Fit, setting: Setting) -> None:
    s = np.linspace(0, setting.target, SAMPLES)
    score = fit.at(s)
    axes.plot(s, score, color=VERMILION, linewidth=1.5)
    inside, beyond = (np.abs(score[part]).max() for part in (s < setting.original, s >= setting.original))
    axes.set_ylim(min(1.1 * score.min(), -1.2 * inside), max(1.1 * score.max(), 1.2 * inside))
    goes_down = -score.min() > score.max()
    # The flat part of the curve leaves the other side free.
    axes.annotate(
        f"$|a| \\leq$ {inside:.2g} inside,\n{beyond:.2g} beyond",
        (0.03, 0.03 if goes_down else 0.97),
        xycoords="axes fraction",
        va="bottom" if goes_down else "top",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )
    _finish(axes, setting=setting)


def _between(axes: Any, fit: Fit) -> None:
    first = min(25, len(fit.points) // 4)
    last = min(first + FEW, len(fit.points) - 1)
    s = np.arange(first, last + 1 / 16, 1 / 8)
    whole = np.arange(first, last + 1, dtype=float)
    axes.vlines(whole, 0, 1, transform=axes.get_xaxis_transform(), color="0.8", linestyle="--", linewidth=0.6)
    axes.plot(s, fit.at(s), color=VERMILION, linewidth=1.5)
    axes.plot(whole, fit.at(whole), color=BLUE, marker=".", linestyle="none", label="whole distances")
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _bound(setting: Setting) -> Any:
    """Figure 5: `B(s) / d`, which Eqn. 8 multiplies."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    s = np.unique(np.linspace(0, setting.target, SAMPLES).round())
    heights = partial_sums(setting.head_dim, setting.theta, s) / setting.head_dim
    axes.plot(s, heights, color=BLUE, linewidth=1.2)
    axes.axhline(1, color="0.3", linestyle="--", linewidth=1)
    low = int(heights.argmin())
    lowest = f"lowest: {heights[low]:.3f}, at {s[low]:.0f} tokens"
    axes.plot(s[low], heights[low], color=VERMILION, marker="o", linestyle="none", label=lowest)
    axes.legend(frameon=False, fontsize=10)
    axes.set(xlabel=DISTANCE, ylabel="$B(s)/d$", xlim=(0, setting.target), ylim=(0, None))
    _finish(axes, f"Extrapolation bound: $B(s)/d$ for $d = {setting.head_dim}$, $c = {setting.theta:g}$")
    return figure


def _heat_map(axes: Any, found: Attention, name: str, title: str) -> None:
    """A number of each head, layers from top to bottom; written out where there is room."""
    layers = sorted({each.layer for each in found.heads})
    values = np.full((len(layers), 1 + max(each.head for each in found.heads)), np.nan)
    for each in found.heads:
        values[layers.index(each.layer), each.head] = getattr(each, name)
    # From yellow to dark blue, which the colour-blind tell apart and which prints in order.
    image = axes.imshow(values, cmap="cividis_r", aspect="auto")
    axes.figure.colorbar(image, ax=axes)
    if values.size <= 128:
        middle = (np.nanmin(values) + np.nanmax(values)) / 2
        for (row, column), value in np.ndenumerate(values):
            ink = "k" if value < middle else "w"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)
    axes.set(xlabel="head", ylabel="layer")
    if len(layers) <= 16:
        axes.set_yticks(range(len(layers)), layers)
    axes.set_title(title, fontsize=11)


def _example(axes: Any, found: Attention, setting: Setting) -> None:
    """The pair whose score grows most: at trained distances, beyond them, and where PI puts it."""
    head, h = found.example
    inside, beyond, between = ((s, attention_score(h, s, setting.theta)) for s in distances(setting))
    axes.plot(*inside, color=BLUE, linewidth=4, alpha=0.4, label="trained")
    axes.plot(*beyond, color=VERMILION, linewidth=1, label="beyond")
    axes.plot(*between, ".", color=GREEN, markersize=1.5, label="where PI puts the target window")
    axes.set(xlabel=DISTANCE, ylabel="score $a(s)$ of one pair")
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=9)
    _finish(axes, f"The pair that grows most: layer {head.layer}, head {head.head}", setting)


def _finish(axes: Any, title: str = "", setting: Setting | None = None) -> None:
    """Grid, title, and a line at the end of the window of `setting`."""
    if setting:
        axes.axvline(setting.original, color="0.3", linestyle="--", linewidth=1)
    axes.set_title(title, fontsize=11)
    plain(axes)
