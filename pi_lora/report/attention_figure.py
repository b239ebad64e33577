"""The scores of a real model beside the bounds, layer by layer and head by head; needs matplotlib."""

from pathlib import Path
from typing import Any

import numpy as np

from pi_lora.report.drawing import BLUE, GREEN, VERMILION, new_figure, plain, save
from pi_lora.theory.bounds import attention_score
from pi_lora.theory.measured import Attention, HeadScores, distances
from pi_lora.theory.setting import Setting

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
