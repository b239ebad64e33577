"""Passkey scores as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pi_lora.drawing import new_figure, plain, save
from pi_lora.evaluation.results import PasskeyMap, PasskeyScores

# From red to blue, which the color-blind tell apart.
COLOURS: Any = {"cmap": "RdYlBu", "vmin": 0, "vmax": 1}


def passkey_table(*models: PasskeyScores) -> Table:
    """Return success by depth, and k_max; of several models side by side."""
    first, alone, rates = models[0], len(models) == 1, _rates(models)
    table = Table(title=_title(models), show_footer=not alone)
    table.add_column("k", "k_max", justify="right")
    for scores in models:
        table.add_column("success" if alone else scores.model, str(scores.k_max), justify="right")
    if alone:
        table.add_column("")
    for k in sorted(set[int]().union(*rates)):
        cells = [f"{found[k]:.0%}" if k in found else "" for found in rates]
        table.add_row(str(k), *cells, *(["█" * round(rates[0][k] * 20)] if alone else []))
    trials = max((depth.trials for depth in first.depths), default=0)
    at_most = "at most " if first.k_max_only else ""
    table.caption = f"scale {_scales(models)}, {at_most}{trials} trials a depth, seed {first.seed}"
    return table


def passkey_picture(models: Sequence[PasskeyScores], file: Path) -> None:
    """Draw success by distance as a PNG: a heat map, of one model's trials or several models' rates, and the curves."""
    figure = new_figure(9, 6)
    above, below = figure.subplots(2, 1, sharex=True)
    ks = sorted({depth.k for scores in models for depth in scores.depths})
    rows, names = _rates(models), [scores.model for scores in models]
    if len(models) == 1:
        outcomes = {depth.k: depth.outcomes or [] for depth in models[0].depths}
        names = [str(trial + 1) for trial in range(max(map(len, outcomes.values())))]
        rows = [
            {k: float(found[trial]) for k, found in outcomes.items() if trial < len(found)}
            for trial in range(len(names))
        ]
        above.set_ylabel("trial")
    width = ks[0] if len(ks) == 1 else ks[1] - ks[0]
    edges = [ks[0] - width / 2, *(k + width / 2 for k in ks)]
    # What was not measured stays empty.
    cells = [[row.get(k, float("nan")) for k in ks] for row in rows]
    above.pcolormesh(edges, [i - 0.5 for i in range(len(names) + 1)], cells, **COLOURS)
    above.set_yticks(range(len(names)), names)
    above.invert_yaxis()
    above.set_title(_title(models), fontsize=11)
    above.spines[["top", "right"]].set_visible(False)
    for scores in models:
        points = [(depth.k, 100 * depth.success_rate) for depth in scores.depths]
        below.plot(*zip(*points, strict=True), marker=".", label=f"{scores.model}: k_max {scores.k_max}")
    below.axhline(20, color="0.6", linestyle=":", linewidth=1)
    below.set(xlabel="passkey distance k (tokens)", ylabel="retrieved (%)", ylim=(-4, 104))
    plain(below, frameon=False, fontsize=9)
    save(figure, file)


def passkey_map_table(*models: PasskeyMap) -> Table:
    """Return success by depth, from the start of the text, against its length; of several models one below another."""
    first, alone = models[0], len(models) == 1
    title = "passkey by depth and length"
    table = Table(title=f"{first.model}: {title}" if alone else title)
    for heading in ("depth", *(f"{each.target:,}" for each in first.lengths)):
        table.add_column(heading, justify="right")
    for scores in models:
        if not alone:
            table.add_row(scores.model, end_section=True)
        longest = scores.lengths[-1]
        for depth, rates in reversed(list(zip(longest.depths, _by_depth(scores), strict=True))):
            table.add_row(f"{1 - depth.k / longest.target:.0%}", *(f"{rate:.0%}" for rate in rates))
        table.add_section()
        table.add_row("k_max", *(f"{each.k_max:,}" for each in scores.lengths), end_section=True)
    trials = max(depth.trials for depth in first.lengths[0].depths)
    how = f"scale {_scales(models)}, {trials} trials a cell, seed {first.seed}"
    table.caption = f"0% is the start of the text; {how}"
    return table


def passkey_map_picture(models: Sequence[PasskeyMap], file: Path) -> None:
    """Draw depth against length as a PNG, a heat map for each model."""
    figure = new_figure(4.5 * len(models) + 0.5, 4)
    for axes, scores in zip(figure.subplots(1, len(models), squeeze=False, sharey=True)[0], models, strict=True):
        axes.set_title(scores.model, fontsize=11)
        draw_passkey_map(scores, axes)
    save(figure, file)


def draw_passkey_map(scores: PasskeyMap, axes: Any) -> None:
    """Draw depth, from the start of the text at the top, against length; every length is as wide as the others."""
    number, depths = len(scores.lengths), len(scores.lengths[0].depths)
    edges = [100 - 100 * index / depths for index in range(depths + 1)]
    drawn = axes.pcolormesh(range(number + 1), edges, _by_depth(scores), **COLOURS)
    axes.set_xticks([index + 0.5 for index in range(number)], [f"{each.target:,}" for each in scores.lengths])
    axes.set(xlabel="length (tokens)", ylabel="depth of the passkey (%)", ylim=(100, 0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.colorbar(drawn, ax=axes, label="retrieved", format=lambda share, _: f"{share:.0%}")


def _by_depth(scores: PasskeyMap) -> list[list[float]]:
    """Success at each depth, the nearest to the end first, over the lengths."""
    columns = [[depth.success_rate for depth in each.depths] for each in scores.lengths]
    return [list(row) for row in zip(*columns, strict=True)]


def _rates(models: Sequence[PasskeyScores]) -> list[dict[int, float]]:
    return [{depth.k: depth.success_rate for depth in scores.depths} for scores in models]


def _scales(models: Sequence[PasskeyScores | PasskeyMap]) -> str:
    return " / ".join(f"{scores.scale:g}" for scores in models)


def _title(models: Sequence[PasskeyScores]) -> str:
    first = models[0]
    if len(models) > 1:
        return f"passkey in {first.target} tokens"
    return f"{first.model}: passkey in {first.target} tokens, k_max {first.k_max}"
