"""Passkey scores as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from pi_lora.errors import DataError
from pi_lora.types import Json


def passkey_table(*models: Json) -> Table:
    """Success by depth, and k_max; of several models side by side."""
    first = models[0]
    table = Table(title=_title(models), show_footer=len(models) > 1)
    table.add_column("k", "k_max", justify="right")
    for scores in models:
        table.add_column(_heading(scores, models), str(scores["k_max"]), justify="right")
    if len(models) == 1:
        table.add_column("")
    rates = [{row["k"]: row["success_rate"] for row in scores["depths"]} for scores in models]
    for k in sorted(set[int]().union(*rates)):
        cells = [f"{found[k]:.0%}" if k in found else "" for found in rates]
        bar = ["█" * round(rates[0][k] * 20)] if len(models) == 1 else []
        table.add_row(str(k), *cells, *bar)
    scales = " / ".join(f"{scores['scale']:g}" for scores in models)
    table.caption = f"scale {scales}, {_trials(first)} a depth, seed {first['seed']}"
    return table


def passkey_picture(models: Sequence[Json], file: Path) -> None:
    """Success by distance as a PNG: a heat map, of the trials of one model or the rates of several, above the curves.

    Raises:
        DataError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    _heat_map(above, models)
    for scores in models:
        depths = scores["depths"]
        label = f"{scores['model']}: k_max {scores['k_max']}"
        below.plot([row["k"] for row in depths], [100 * row["success_rate"] for row in depths], marker=".", label=label)
    below.axhline(20, color="0.6", linestyle=":", linewidth=1)
    below.set(xlabel="passkey distance k (tokens)", ylabel="retrieved (%)", ylim=(-4, 104))
    below.grid(alpha=0.25)
    below.legend(frameon=False, fontsize=9)
    above.set_title(_title(models), fontsize=11)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="png", dpi=160)
    except OSError as error:
        raise DataError(f"{file}: cannot be written ({error.strerror}); choose another file") from None
    finally:
        pyplot.close(figure)


def _heat_map(axes: Any, models: Sequence[Json]) -> None:
    """Depths from left to right; what was not measured stays empty."""
    ks = sorted({row["k"] for scores in models for row in scores["depths"]})
    if len(models) == 1:
        depths = {row["k"]: row["outcomes"] for row in models[0]["depths"]}
        number = max(map(len, depths.values()))
        values = [[float(depths[k][trial]) if trial < len(depths[k]) else None for k in ks] for trial in range(number)]
        names = [str(trial + 1) for trial in range(number)]
        axes.set_ylabel("trial")
    else:
        rates = [{row["k"]: row["success_rate"] for row in scores["depths"]} for scores in models]
        values = [[found.get(k) for k in ks] for found in rates]
        names = [str(scores["model"]) for scores in models]
    cells = [[float("nan") if value is None else value for value in line] for line in values]
    width = ks[0] if len(ks) == 1 else ks[1] - ks[0]
    edges = [ks[0] - width / 2, *(k + width / 2 for k in ks)]
    # From red to blue, which the colour-blind tell apart.
    axes.pcolormesh(edges, [i - 0.5 for i in range(len(names) + 1)], cells, cmap="RdYlBu", vmin=0, vmax=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _title(models: Sequence[Json]) -> str:
    first = models[0]
    if len(models) > 1:
        return f"passkey in {first['target']} tokens"
    return f"{first['model']}: passkey in {first['target']} tokens, k_max {first['k_max']}"


def _heading(scores: Json, models: Sequence[Json]) -> str:
    return "success" if len(models) == 1 else str(scores["model"])


def _trials(scores: Json) -> str:
    most = max(row["trials"] for row in scores["depths"])
    return f"at most {most} trials" if scores.get("k_max_only") else f"{most} trials"
