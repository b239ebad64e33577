"""The bounds, and how far a model stays below them, as tables and figures."""

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Column, Table

from pi_lora.drawing import BLUE, GREEN, GREY, VERMILION, new_figure, plain, save
from pi_lora.theory import bounds
from pi_lora.theory.bounds import Setting

if TYPE_CHECKING:  # the bounds alone take no torch
    from pi_lora.theory.heads import Attention

# Figure 2's second row: what is added to the sum of squares; the fit stays as close to the points as without.
RIDGE = 10.0
DOTS, FEWEST_DOTS = 48, 6  # of figure 1 in all, and inside the window
SAMPLES = 4096  # of a curve
FEW = 50  # distances between which figure 2 looks
DISTANCE = "positional difference $s$ (tokens)"
BOXED: Any = {"framealpha": 0.9, "edgecolor": "none", "fontsize": 9}  # a legend over a curve
DASHED: Any = {"color": "0.3", "linestyle": "--", "linewidth": 1}


def bounds_table(setting: Setting, found: bounds.Bounds) -> Table:
    """Return section 2.3 in numbers: as the paper states it, and as it holds."""
    table = Table("", *(Column(name, justify="right") for name in ("paper", "holds for every h")))
    table.title = f"d {setting.head_dim}, c {setting.theta:g}, L {setting.original}, L' {setting.target}"
    lowest = f"{found.lowest:.4g} on all whole s in [0, {setting.target}] (at {found.lowest_at})"
    table.caption = f"B(s)/d is at least {lowest}; H is max_j |h_j|"
    table.add_row("interpolation, |a - a_linear|", f"d H / {found.papers_divisor:.2f}", f"d H / {found.divisor:.2f}")
    table.add_row("extrapolation, |a|", "2 H B(s)", "2 H B(s)")
    table.add_row("their ratio if B(s) = d", f"{found.papers_factor:.1f}", f"{found.factor:.1f}")
    table.add_row("their ratio where B(s) is least", f"{found.papers_ratio:.1f}", f"{found.ratio:.1f}")
    return table


def attention_table(found: "Attention") -> Table:
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
    table = Table(*(Column(name, justify="right") for name in ("layer", *(heading for heading, _, _ in columns))))
    text = f"{found.tokens} tokens of {found.text}"
    table.title = f"{found.model}: scores of {found.pairs} queries and keys a head, {text}"
    table.caption = "largest over heads, pairs and distances; shares are of the bound for the same pair and distance"
    for layer, group in groupby(found.heads, key=lambda one: one.layer):
        heads = list(group)
        table.add_row(str(layer), *(format(max(getattr(one, key) for one in heads), form) for _, key, form in columns))
    return table


def draw_theory(setting: Setting, folder: Path) -> list[Path]:
    """Write `positions`, `fit` and `bound` as PNG and SVG; raise DataError if the folder cannot be written."""
    return _saved({"positions": _positions(setting), "fit": _fit(setting), "bound": _bound(setting)}, folder)


def draw_attention(found: "Attention", setting: Setting, folder: Path) -> list[Path]:
    """Write `measured` as PNG and SVG; raise DataError if the folder cannot be written."""
    figure = new_figure(12, 8)
    (growth, beyond), (between, curve) = figure.subplots(2, 2)
    _heat_map(growth, found, "growth", "Beyond the window / inside: largest |a|, of one pair")
    _heat_map(beyond, found, "beyond_share", "Beyond the window: |a| / extrapolation bound")
    _heat_map(between, found, "between_share", "In between: |a - a_linear| / interpolation bound")
    # The pair whose score grows most: at trained distances, beyond them, and where PI puts it.
    head, h = found.example
    inside, unseen, fractional = ((s, bounds.attention_score(h, s, setting.theta)) for s in bounds.distances(setting))
    curve.plot(*inside, color=BLUE, linewidth=4, alpha=0.4, label="trained")
    curve.plot(*unseen, color=VERMILION, linewidth=1, label="beyond")
    curve.plot(*fractional, ".", color=GREEN, markersize=1.5, label="where PI puts the target window")
    curve.set(xlabel=DISTANCE, ylabel="score $a(s)$ of one pair")
    curve.axvline(setting.original, **DASHED)
    plain(curve, f"The pair that grows most: layer {head.layer}, head {head.head}", **BOXED)
    figure.suptitle(f"{found.model}, {found.pairs} queries and keys a head from {found.tokens} tokens", fontsize=11)
    return _saved({"measured": figure}, folder)


def _saved(figures: dict[str, Any], folder: Path) -> list[Path]:
    return [save(each, folder / f"{name}.{kind}", kind) for name, each in figures.items() for kind in ("png", "svg")]


def _positions(setting: Setting) -> Any:
    """Figure 1: where positions fall on the wave of one rotary pair: as trained, extrapolated, interpolated."""
    figure = new_figure(10, 4.6)
    above, below = figure.subplots(2, 1, sharex=True)
    length, target = setting.original, setting.target
    # Of the waves there are, the one that turns about twice within the window.
    speeds = bounds.frequencies(setting.head_dim, setting.theta)
    speed = speeds[np.abs(np.log(speeds * length / (4 * np.pi))).argmin()]
    step = length / max(FEWEST_DOTS, round(DOTS * length / target))
    positions = np.arange(0, target, step)
    squeezed = positions * length / target
    trained, on_the_grid = positions < length, np.isclose(squeezed / step, np.round(squeezed / step))
    extrapolated = (
        (positions[trained], BLUE, "o", f"trained, below {length}"),
        (positions[~trained], VERMILION, "X", f"unseen, up to {target}"),
    )
    interpolated = (
        (squeezed[on_the_grid], BLUE, "o", "as trained"),
        (squeezed[~on_the_grid], GREEN, "D", "in between"),
    )
    wave = np.linspace(0, target, SAMPLES)
    for axes, title, dots in (
        (above, "Extrapolation: position indices leave the trained range", extrapolated),
        (below, f"Position Interpolation: indices are multiplied by {length}/{target}", interpolated),
    ):
        axes.axvspan(0, length, color=GREY, alpha=0.15, linewidth=0)
        axes.plot(wave, np.sin(wave * speed), color="0.6", linewidth=1)
        axes.set(xlim=(-target / 100, target), ylim=(-1.35, 1.9), yticks=(-1, 0, 1), ylabel="rotary wave")
        for at, colour, marker, label in dots:
            axes.plot(at, np.sin(at * speed), marker, color=colour, label=label, markersize=4.5)
        axes.axvline(length, **DASHED)
        plain(axes, title, frameon=False, fontsize=9, loc="upper right", ncols=2)
    below.set_xlabel("position index (tokens)")
    return figure


def _fit(setting: Setting) -> Any:
    """Figure 2: a score fitted to noise inside the window, beyond it and in between; by least squares, and by ridge."""
    figure = new_figure(13, 6.8)
    rows = figure.subplots(2, 3)
    fits = {"least squares": 0.0, f"ridge, {RIDGE:g}": RIDGE}
    for (inside, beyond, between), (name, ridge) in zip(rows, fits.items(), strict=True):
        points, h = bounds.fit_noise(setting.head_dim, setting.theta, setting.original, ridge)
        score = partial(bounds.attention_score, h, theta=setting.theta)
        s = np.arange(setting.original, dtype=float)
        # Thousands of dots are one bitmap in the SVG.
        inside.scatter(s, points, s=4, color=BLUE, alpha=0.35, linewidth=0, rasterized=True, label="points")
        inside.plot(s, score(s), color=VERMILION, linewidth=1.5, label=name)
        inside.set_ylabel("attention score $a(s)$")
        plain(inside, loc="upper right", **BOXED)
        s = np.linspace(0, setting.target, SAMPLES)
        _beyond(beyond, s, score(s), setting)
        first = min(25, setting.original // 4)
        last = min(first + FEW, setting.original - 1)
        fine, whole = np.arange(first, last + 1 / 16, 1 / 8), np.arange(first, last + 1, dtype=float)
        between.vlines(whole, 0, 1, transform=between.get_xaxis_transform(), color="0.8", linestyle="--", linewidth=0.6)
        between.plot(fine, score(fine), color=VERMILION, linewidth=1.5)
        between.plot(whole, score(whole), ".", color=BLUE, label="whole distances")
        plain(between, **BOXED)
        between.grid(visible=False)
    titles = ("Fitted in $[0, L)$", "Effect of extrapolation", "Effect of interpolation")
    for (above, below), title in zip(rows.T, titles, strict=True):
        above.set_title(title, fontsize=11)
        below.set_xlabel(DISTANCE)
    return figure


def _beyond(axes: Any, s: bounds.Reals, score: bounds.Reals, setting: Setting) -> None:
    axes.plot(s, score, color=VERMILION, linewidth=1.5)
    inside, beyond = (np.abs(score[part]).max() for part in (s < setting.original, s >= setting.original))
    axes.set_ylim(min(1.1 * score.min(), -1.2 * inside), max(1.1 * score.max(), 1.2 * inside))
    # The flat part of the curve leaves the other side free.
    y, side = (0.03, "bottom") if -score.min() > score.max() else (0.97, "top")
    text, box = f"$|a| \\leq$ {inside:.2g} inside,\n{beyond:.2g} beyond", {"facecolor": "white", "edgecolor": "none"}
    axes.text(0.03, y, text, va=side, fontsize=9, transform=axes.transAxes, bbox={**box, "alpha": 0.85})
    axes.axvline(setting.original, **DASHED)
    plain(axes)


def _bound(setting: Setting) -> Any:
    """Figure 5: `B(s) / d`, which Eqn. 8 multiplies."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    s = np.unique(np.linspace(0, setting.target, SAMPLES).round())
    heights = bounds.partial_sums(setting.head_dim, setting.theta, s) / setting.head_dim
    axes.plot(s, heights, color=BLUE, linewidth=1.2)
    axes.axhline(1, **DASHED)
    low = int(heights.argmin())
    axes.plot(s[low], heights[low], "o", color=VERMILION, label=f"lowest: {heights[low]:.3f}, at {s[low]:.0f} tokens")
    axes.set(xlabel=DISTANCE, ylabel="$B(s)/d$", xlim=(0, setting.target), ylim=(0, None))
    title = f"Extrapolation bound: $B(s)/d$ for $d = {setting.head_dim}$, $c = {setting.theta:g}$"
    plain(axes, title, frameon=False, fontsize=10)
    return figure


def _heat_map(axes: Any, found: "Attention", name: str, title: str) -> None:
    """A number of each head, layers from top to bottom; written out where there is room."""
    layers = sorted({each.layer for each in found.heads})
    values = np.full((len(layers), 1 + max(each.head for each in found.heads)), np.nan)
    for each in found.heads:
        values[layers.index(each.layer), each.head] = getattr(each, name)
    # From yellow to dark blue, which the colour-blind tell apart and which prints in order.
    axes.figure.colorbar(axes.imshow(values, cmap="cividis_r", aspect="auto"), ax=axes)
    if values.size <= 128:
        middle = (np.nanmin(values) + np.nanmax(values)) / 2
        for (row, column), value in np.ndenumerate(values):
            ink = "k" if value < middle else "w"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)
    axes.set(xlabel="head", ylabel="layer")
    if len(layers) <= 16:
        axes.set_yticks(range(len(layers)), layers)
    axes.set_title(title, fontsize=11)
