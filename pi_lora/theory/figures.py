"""The bounds as a table and as figures."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from pi_lora.drawing import BLUE, GREEN, GREY, VERMILION, new_figure, plain, save
from pi_lora.theory import bounds
from pi_lora.theory.bounds import Setting

# The fewest dots of figure 1 in all, and inside the window.
DOTS = 48
DOTS_INSIDE = 6
# Points of a curve.
SAMPLES = 4096
# Whole distances that figure 2 shows under interpolation.
DISTANCES_SHOWN = 50
DISTANCE = "positional difference $s$ (tokens)"
DASHED: Any = {"color": "0.3", "linestyle": "--", "linewidth": 1}


def bounds_table(setting: Setting, result: bounds.Bounds) -> Table:
    """Return the numbers of section 2.3 according to the paper, and the proven ones."""
    table = Table("")
    table.add_column("paper", justify="right")
    table.add_column("holds for every h", justify="right")
    table.title = f"d {setting.head_dim}, c {setting.theta:g}, L {setting.original}, L' {setting.target}"
    lowest = f"{result.lowest:.4g} on all whole s in [0, {setting.target}] (at {result.lowest_at})"
    table.caption = f"B(s)/d is at least {lowest}; H is max_j |h_j|"
    papers = result.papers_divisor
    proven = result.divisor
    at_lowest = 2 * result.lowest
    table.add_row("interpolation, |a - a_linear|", f"d H / {papers:.2f}", f"d H / {proven:.2f}")
    table.add_row("extrapolation, |a|", "2 H B(s)", "2 H B(s)")
    table.add_row("their ratio if B(s) = d", f"{2 * papers:.1f}", f"{2 * proven:.1f}")
    table.add_row("their ratio where B(s) is least", f"{at_lowest * papers:.1f}", f"{at_lowest * proven:.1f}")
    return table


def draw_theory(setting: Setting, folder: Path) -> Iterator[Path]:
    """Write `positions`, `fit` and `bound` as PNG, and yield the files."""
    yield save(_positions(setting), folder / "positions.png")
    yield save(_fit(setting), folder / "fit.png")
    yield save(_bound(setting), folder / "bound.png")


def _positions(setting: Setting) -> Any:
    """Figure 1: where positions fall on the wave of one rotary pair: as trained, extrapolated, interpolated."""
    length = setting.original
    target = setting.target
    # The rotary frequency that turns about twice within the window.
    frequencies = bounds.frequencies(setting.head_dim, setting.theta)
    turns_twice = 4 * np.pi / length
    distances = np.abs(np.log(frequencies / turns_twice))
    frequency = frequencies[distances.argmin()]
    step = min(target / DOTS, length / DOTS_INSIDE)
    positions = np.arange(0, target, step)
    trained = positions[positions < length]
    unseen = positions[positions >= length]

    def wave(positions: bounds.Reals) -> Any:
        return np.sin(positions * frequency)

    def draw(axes: Any, title: str, others: bounds.Reals, marker: str, color: str, label: str) -> None:
        axes.axvspan(0, length, color=GREY, alpha=0.15, linewidth=0)
        curve = np.linspace(0, target, SAMPLES)
        axes.plot(curve, wave(curve), color="0.6", linewidth=1)
        axes.plot(
            others,
            wave(others),
            marker,
            color=color,
            label=label,
            markersize=4.5,
        )
        axes.plot(
            trained,
            wave(trained),
            "o",
            color=BLUE,
            label="trained",
            markersize=4.5,
        )
        axes.set(ylim=(-1.35, 1.9), ylabel="rotary wave", xlabel="position index (tokens)")
        plain(axes, title, frameon=False, fontsize=9, loc="upper right", ncols=2)

    figure = new_figure(10, 4.6)
    above, below = figure.subplots(2, 1)
    extrapolated = "Extrapolation: position indices leave the trained range"
    draw(above, extrapolated, unseen, marker="X", color=VERMILION, label="unseen")
    interpolated = f"Position Interpolation: indices are multiplied by {length}/{target}"
    draw(
        below,
        interpolated,
        positions * length / target,
        marker="D",
        color=GREEN,
        label="in between",
    )
    return figure


def _fit(setting: Setting) -> Any:
    """Figure 2: a score fitted to noise inside the window by least squares, beyond it and in between."""
    length = setting.original
    points, h = bounds.fit_noise(setting.head_dim, setting.theta, length)
    score = partial(bounds.attention_score, h, theta=setting.theta)

    def draw(axes: Any, title: str, s: bounds.Reals) -> None:
        axes.plot(s, score(s), color=VERMILION, linewidth=1.5, label="fit")
        axes.set(xlabel=DISTANCE, ylabel="attention score $a(s)$")
        plain(axes, title)

    figure = new_figure(13, 3.4)
    inside, beyond, between = figure.subplots(1, 3)
    draw(inside, "Fitted in $[0, L)$", np.arange(length, dtype=float))
    inside.plot(
        points,
        ".",
        color=BLUE,
        alpha=0.35,
        markersize=3,
        label="points",
        zorder=1,
    )
    inside.legend(loc="upper right")
    draw(beyond, "Effect of extrapolation", np.linspace(0, setting.target, SAMPLES))
    beyond.axvline(length, **DASHED)
    first = min(25, length // 4)
    whole = np.arange(first, min(first + DISTANCES_SHOWN, length))
    draw(between, "Effect of interpolation", np.arange(first, whole[-1] + 1 / 16, 1 / 8))
    between.plot(whole, score(whole), "o", color=BLUE, label="whole distances")
    between.legend()
    return figure


def _bound(setting: Setting) -> Any:
    """Figure 5: `B(s) / d`, a factor of the bound in Eqn. 8."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    s = np.unique(np.linspace(0, setting.target, SAMPLES).round())
    heights = bounds.partial_sums(setting.head_dim, setting.theta, s) / setting.head_dim
    axes.plot(s, heights, color=BLUE, linewidth=1.2)
    axes.axhline(1, **DASHED)
    lowest = heights.min()
    lowest_at = s[heights.argmin()]
    label = f"lowest: {lowest:.3f}, at {lowest_at:.0f} tokens"
    axes.plot(lowest_at, lowest, "o", color=VERMILION, label=label)
    axes.set(xlabel=DISTANCE, ylabel="$B(s)/d$", xlim=(0, setting.target), ylim=(0, None))
    title = f"Extrapolation bound: $B(s)/d$ for $d = {setting.head_dim}$, $c = {setting.theta:g}$"
    plain(axes, title, frameon=False, fontsize=10)
    return figure
