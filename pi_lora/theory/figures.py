"""The bounds, and how far a model stays below them, as tables."""

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from pi_lora.drawing import BLUE, GREEN, GREY, VERMILION, new_figure, plain, save
from pi_lora.theory.bounds import Bounds, Setting, attention_score, frequencies, partial_sums
from pi_lora.theory.fit import Fit, fit_noise
from pi_lora.theory.measured import Attention, HeadScores, distances


def bounds_table(setting: Setting, bounds: Bounds) -> Table:
    """Section 2.3 in numbers: as the paper states it, and as it holds."""
    table = Table(
        title=f"d {setting.head_dim}, c {setting.theta:g}, L {setting.original}, L' {setting.target}",
        caption=f"B(s)/d is at least {bounds.lowest:.4g} on all whole s in [0, {setting.target}] "
        f"(at {bounds.lowest_at}); H is max_j |h_j|",
    )
    table.add_column("")
    table.add_column("paper", justify="right")
    table.add_column("holds for every h", justify="right")
    table.add_row("interpolation, |a - a_linear|", f"d H / {bounds.papers_divisor:.2f}", f"d H / {bounds.divisor:.2f}")
    table.add_row("extrapolation, |a|", "2 H B(s)", "2 H B(s)")
    table.add_row("their ratio if B(s) = d", f"{bounds.papers_factor:.1f}", f"{bounds.factor:.1f}")
    table.add_row("their ratio where B(s) is least", f"{bounds.papers_ratio:.1f}", f"{bounds.ratio:.1f}")
    return table


def attention_table(found: Attention) -> Table:
    """The largest of each layer, over its heads."""
    table = Table(
        title=f"{found.model}: scores of {found.pairs} queries and keys a head, {found.tokens} tokens of {found.text}",
        caption="the largest over heads, pairs and distances; shares are of the bound for the same pair and distance",
    )
    for name in (
        "layer",
        "H",
        "|a| inside",
        "|a| beyond",
        "of its bound",
        "|a - line|",
        "of its bound",
        "of Eqn. 5",
    ):
        table.add_column(name, justify="right")
    for layer, group in groupby(found.heads, key=lambda each: each.layer):
        heads = list(group)
        table.add_row(
            str(layer),
            *(f"{max(getattr(each, key) for each in heads):.1f}" for key in ("coefficient", "inside", "beyond")),
            f"{max(each.beyond_share for each in heads):.0%}",
            f"{max(each.between for each in heads):.2f}",
            f"{max(each.between_share for each in heads):.0%}",
            f"{max(each.papers_share for each in heads):.0%}",
        )
    return table


# What is added to the sum of squares for figure 2's second row; the fit stays as close to the points as without.
RIDGE = 10.0
DOTS, FEWEST_DOTS = 48, 6  # of figure 1 in all, and inside the window
SAMPLES = 4096
FEW = 50  # distances between which figure 2 looks


def draw_theory(setting: Setting, folder: Path) -> list[Path]:
    """Write `positions`, `fit` and `bound` into `folder`, each as PNG and SVG.

    Raises:
        DataError: the folder cannot be written.
    """
    return [
        *save(_positions(setting), folder, "positions"),
        *save(_fit(setting), folder, "fit"),
        *save(_bound(setting), folder, "bound"),
    ]


def _positions(setting: Setting) -> Any:
    """Figure 1: where positions fall on the wave of one rotary pair: as trained, extrapolated, interpolated."""
    figure = new_figure(10, 4.6)
    above, below = figure.subplots(2, 1, sharex=True)
    length, target = setting.original, setting.target
    # The wave that turns about twice within the window, of those there are.
    speeds = frequencies(setting.head_dim, setting.theta)
    speed = speeds[np.abs(np.log(speeds * length / (4 * np.pi))).argmin()]
    wave = np.linspace(0, target, SAMPLES)
    for axes in (above, below):
        axes.axvspan(0, length, color=GREY, alpha=0.15, linewidth=0)
        axes.plot(wave, np.sin(wave * speed), color="0.6", linewidth=1)
        axes.axvline(length, color="0.3", linestyle="--", linewidth=1)
        axes.set(xlim=(-target / 100, target), ylim=(-1.35, 1.9), yticks=(-1, 0, 1), ylabel="rotary wave")
        plain(axes)
    scale = target / length
    step = length / max(FEWEST_DOTS, round(DOTS / scale))
    positions = np.arange(0, target, step)
    squeezed = positions / scale
    on_the_grid = np.isclose(squeezed / step, np.round(squeezed / step))
    dots = (
        (above, positions[positions < length], BLUE, "o", f"trained, below {length}"),
        (above, positions[positions >= length], VERMILION, "X", f"unseen, up to {target}"),
        (below, squeezed[on_the_grid], BLUE, "o", "as trained"),
        (below, squeezed[~on_the_grid], GREEN, "D", "in between"),
    )
    for axes, at, colour, marker, label in dots:
        axes.plot(at, np.sin(at * speed), color=colour, marker=marker, label=label, linestyle="none", markersize=4.5)
    above.set_title("Extrapolation: position indices leave the trained range", fontsize=11)
    below.set_title(f"Position Interpolation: indices are multiplied by {length}/{target}", fontsize=11)
    below.set_xlabel("position index (tokens)")
    for axes in (above, below):
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
    for axes in rows[-1]:
        axes.set_xlabel("positional difference $s$ (tokens)")
    rows[0][0].set_title("Fitted in $[0, L)$", fontsize=11)
    rows[0][1].set_title("Effect of extrapolation", fontsize=11)
    rows[0][2].set_title("Effect of interpolation", fontsize=11)
    return figure


def _inside(axes: Any, fit: Fit, name: str) -> None:
    s = np.arange(len(fit.points), dtype=float)
    # Thousands of dots are one bitmap in the SVG.
    axes.scatter(s, fit.points, s=4, color=BLUE, alpha=0.35, linewidth=0, rasterized=True, label="points")
    axes.plot(s, fit.at(s), color=VERMILION, linewidth=1.5, label=name)
    axes.set_ylabel("attention score $a(s)$")
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=9, loc="upper right")
    plain(axes)


def _beyond(axes: Any, fit: Fit, setting: Setting) -> None:
    s = np.linspace(0, setting.target, SAMPLES)
    score = fit.at(s)
    axes.plot(s, score, color=VERMILION, linewidth=1.5)
    axes.axvline(setting.original, color="0.3", linestyle="--", linewidth=1)
    inside = np.abs(score[s < setting.original]).max()
    axes.set_ylim(min(1.1 * score.min(), -1.2 * inside), max(1.1 * score.max(), 1.2 * inside))
    largest = f"{np.abs(score[s >= setting.original]).max():.2g}"
    # Off the flat part of the curve, which lies where the blow-up does not go.
    goes_down = -score.min() > score.max()
    axes.annotate(
        f"$|a| \\leq$ {inside:.2g} inside,\n{largest} beyond",
        (0.03, 0.03 if goes_down else 0.97),
        xycoords="axes fraction",
        va="bottom" if goes_down else "top",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85},
    )
    plain(axes)


def _between(axes: Any, fit: Fit) -> None:
    first = min(25, len(fit.points) // 4)
    last = min(first + FEW, len(fit.points) - 1)
    s = np.arange(first, last + 1 / 16, 1 / 8)
    whole = np.arange(first, last + 1, dtype=float)
    axes.vlines(whole, 0, 1, transform=axes.get_xaxis_transform(), color="0.8", linestyle="--", linewidth=0.6)
    axes.plot(s, fit.at(s), color=VERMILION, linewidth=1.5)
    axes.plot(whole, fit.at(whole), color=BLUE, marker=".", linestyle="none", label="whole distances")
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)
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
    axes.set(xlabel="positional difference $s$ (tokens)", ylabel="$B(s)/d$", xlim=(0, setting.target), ylim=(0, None))
    axes.set_title(f"Extrapolation bound: $B(s)/d$ for $d = {setting.head_dim}$, $c = {setting.theta:g}$", fontsize=11)
    plain(axes)
    return figure


# From yellow to dark blue, which the colour-blind tell apart and which prints in order.
MAP = "cividis_r"


def draw_attention(found: Attention, setting: Setting, folder: Path) -> list[Path]:
    """Write `measured` into `folder` as PNG and SVG.

    Raises:
        DataError: the folder cannot be written.
    """
    figure = new_figure(12, 8)
    (growth, beyond), (between, curve) = figure.subplots(2, 2)
    _heat_map(growth, found, "growth", "Beyond the window / inside: largest |a|, of one pair")
    _heat_map(beyond, found, "beyond_share", "Beyond the window: |a| / extrapolation bound")
    _heat_map(between, found, "between_share", "In between: |a - a_linear| / interpolation bound")
    _example(curve, max(found.heads, key=lambda each: each.growth), setting)
    figure.suptitle(f"{found.model}, {found.pairs} queries and keys a head from {found.tokens} tokens", fontsize=11)
    return save(figure, folder, "measured")


def _heat_map(axes: Any, found: Attention, name: str, title: str) -> None:
    """A number of each head, layers from top to bottom; written out where there is room."""
    layers = sorted({each.layer for each in found.heads})
    width = 1 + max(each.head for each in found.heads)
    values = np.full((len(layers), width), np.nan)
    for each in found.heads:
        values[layers.index(each.layer), each.head] = getattr(each, name)
    image = axes.imshow(values, cmap=MAP, aspect="auto")
    axes.figure.colorbar(image, ax=axes)
    if values.size <= 128:
        middle = (np.nanmin(values) + np.nanmax(values)) / 2
        for (row, column), value in np.ndenumerate(values):
            axes.text(
                column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color="wk"[int(value < middle)]
            )
    axes.set(xlabel="head", ylabel="layer")
    if len(layers) <= 16:
        axes.set_yticks(range(len(layers)), layers)
    axes.set_title(title, fontsize=11)


def _example(axes: Any, head: HeadScores, setting: Setting) -> None:
    """The pair whose score grows most of all: at trained distances, beyond them, and where PI puts it."""
    inside, beyond, between = distances(setting)
    h = np.array(head.example)
    axes.plot(inside, attention_score(h, inside, setting.theta), color=BLUE, linewidth=4, alpha=0.4, label="trained")
    axes.plot(beyond, attention_score(h, beyond, setting.theta), color=VERMILION, linewidth=1, label="beyond")
    axes.plot(
        between,
        attention_score(h, between, setting.theta),
        color=GREEN,
        marker=".",
        markersize=1.5,
        linestyle="none",
        label="where PI puts the target window",
    )
    axes.axvline(setting.original, color="0.3", linestyle="--", linewidth=1)
    axes.set(xlabel="positional difference $s$ (tokens)", ylabel="score $a(s)$ of one pair")
    axes.set_title(f"The pair that grows most: layer {head.layer}, head {head.head}", fontsize=11)
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=9)
    plain(axes)
