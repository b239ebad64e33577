"""The bounds as a table and as figures."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

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
    table = Table("", Column("paper", justify="right"), Column("holds for every h", justify="right"))
    table.title = f"d {setting.head_dim}, c {setting.theta:g}, L {setting.original}, L' {setting.target}"
    lowest = f"{result.lowest:.4g} on all whole s in [0, {setting.target}] (at {result.lowest_at})"
    table.caption = f"B(s)/d is at least {lowest}; H is max_j |h_j|"
    papers = result.papers_divisor
    proven = result.divisor
    table.add_row("interpolation, |a - a_linear|", f"d H / {papers:.2f}", f"d H / {proven:.2f}")
    table.add_row("extrapolation, |a|", "2 H B(s)", "2 H B(s)")
    table.add_row("their ratio if B(s) = d", f"{2 * papers:.1f}", f"{2 * proven:.1f}")
    lowest_ratios = [f"{2 * result.lowest * divisor:.1f}" for divisor in (papers, proven)]
    table.add_row("their ratio where B(s) is least", *lowest_ratios)
    return table


def draw_theory(setting: Setting, folder: Path) -> list[Path]:
    """Write `positions`, `fit` and `bound` as PNG."""
    figures = {"positions": _positions(setting), "fit": _fit(setting), "bound": _bound(setting)}
    return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def _positions(setting: Setting) -> Any:
    """Figure 1: where positions fall on the wave of one rotary pair: as trained, extrapolated, interpolated."""
    figure = new_figure(10, 4.6)
    length = setting.original
    target = setting.target
    # The rotary frequency that turns about twice within the window.
    frequencies = bounds.frequencies(setting.head_dim, setting.theta)
    turns_twice = 4 * np.pi / length
    frequency = frequencies[np.abs(np.log(frequencies / turns_twice)).argmin()]
    positions = np.arange(0, target, min(target / DOTS, length / DOTS_INSIDE))
    trained = positions[positions < length]
    unseen = positions[positions >= length]
    interpolated = f"Position Interpolation: indices are multiplied by {length}/{target}"
    rows = {
        "Extrapolation: position indices leave the trained range": (unseen, "X", VERMILION, "unseen"),
        interpolated: (positions * length / target, "D", GREEN, "in between"),
    }
    wave = np.linspace(0, target, SAMPLES)
    for axes, (title, others) in zip(figure.subplots(2, 1), rows.items(), strict=True):
        axes.axvspan(0, length, color=GREY, alpha=0.15, linewidth=0)
        axes.plot(wave, np.sin(wave * frequency), color="0.6", linewidth=1)
        for dots, marker, color, label in (others, (trained, "o", BLUE, "trained")):
            axes.plot(dots, np.sin(dots * frequency), marker, color=color, label=label, markersize=4.5)
        axes.set(ylim=(-1.35, 1.9), ylabel="rotary wave", xlabel="position index (tokens)")
        plain(axes, title, frameon=False, fontsize=9, loc="upper right", ncols=2)
    return figure


def _fit(setting: Setting) -> Any:
    """Figure 2: a score fitted to noise inside the window by least squares, beyond it and in between."""
    figure = new_figure(13, 3.4)
    length = setting.original
    first = min(25, length // 4)
    whole = np.arange(first, min(first + DISTANCES_SHOWN, length))
    fine = np.arange(first, whole[-1] + 1 / 16, 1 / 8)
    parts = (
        ("Fitted in $[0, L)$", np.arange(length, dtype=float)),
        ("Effect of extrapolation", np.linspace(0, setting.target, SAMPLES)),
        ("Effect of interpolation", fine),
    )
    points, h = bounds.fit_noise(setting.head_dim, setting.theta, length)
    panels = figure.subplots(1, 3)
    for axes, (title, s) in zip(panels, parts, strict=True):
        axes.plot(s, bounds.attention_score(h, s, setting.theta), color=VERMILION, linewidth=1.5, label="fit")
        axes.set(xlabel=DISTANCE, ylabel="attention score $a(s)$")
        plain(axes, title)
    inside, beyond, between = panels
    inside.plot(points, ".", color=BLUE, alpha=0.35, markersize=3, label="points", zorder=1)
    inside.legend(loc="upper right")
    beyond.axvline(length, **DASHED)
    between.plot(whole, bounds.attention_score(h, whole, setting.theta), "o", color=BLUE, label="whole distances")
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
    low = int(heights.argmin())
    lowest = f"lowest: {heights[low]:.3f}, at {s[low]:.0f} tokens"
    axes.plot(s[low], heights[low], "o", color=VERMILION, label=lowest)
    axes.set(xlabel=DISTANCE, ylabel="$B(s)/d$", xlim=(0, setting.target), ylim=(0, None))
    title = f"Extrapolation bound: $B(s)/d$ for $d = {setting.head_dim}$, $c = {setting.theta:g}$"
    plain(axes, title, frameon=False, fontsize=10)
    return figure
