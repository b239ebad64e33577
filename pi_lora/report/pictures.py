"""Json as pictures; needs matplotlib."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from pi_lora.drawing import STYLES, new_figure, plain, save, themed
from pi_lora.types import Json


def comparison_picture(rows: Mapping[str, tuple[Json, Json]], original: int, file: Path) -> None:
    """Perplexity against window beside passkey success against distance, as a PNG; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for (name, (perplexity, passkey)), (colour, marker) in zip(rows.items(), STYLES, strict=False):
        windows = perplexity["windows"]
        style = {"color": colour, "marker": marker, "label": name, "markersize": 5}
        left.plot([row["window"] for row in windows], [row["perplexity"] for row in windows], **style)
        depths = passkey["depths"]
        right.plot([row["k"] for row in depths], [100 * row["success_rate"] for row in depths], **style)
    left.set(xscale="log", yscale="log", xlabel="window (tokens)", ylabel="perplexity (lower is better)")
    ticks = [row["window"] for row in next(iter(rows.values()))[0]["windows"]]
    left.set_xticks(ticks, [str(tick) for tick in ticks])
    low, high = left.get_ylim()
    levels = [level for level in (2, 5, 7, 10, 20, 50, 100, 200, 500, 1000) if low <= level <= high]
    left.set_yticks(levels, [str(level) for level in levels])
    left.minorticks_off()
    right.set(xlabel="passkey distance k (tokens)", ylabel="retrieved (%)", ylim=(-4, 104))
    for axes in (left, right):
        axes.axvline(original, color="0.6", linestyle=":", linewidth=1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_title("Language modeling", fontsize=11)
    right.set_title("Passkey retrieval", fontsize=11)
    left.legend(frameon=False, fontsize=9)
    right.annotate(
        "trained window", (original, 50), (4, 0), textcoords="offset points", rotation=90, va="center", color="0.4"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=160)
    pyplot.close(figure)


# Narrow enough that the letters can be read on a phone.
SIZE = (5.0, 3.7)


Drawings = dict[str, Callable[[], Any]]


def drawings_of(
    perplexity: Mapping[str, Json],
    passkey: Mapping[str, Json],
    losses: Mapping[str, Sequence[Mapping[str, Any]]],
    original: int | None,
) -> Drawings:
    """What draws `perplexity`, `passkey` and `loss`, of those that there is something for.

    The mappings are from what a curve is called to scores, or to the lines of a training log; `original` is the window
    before stretching, in tokens.
    """
    drawings: Drawings = {}
    if perplexity:
        drawings["perplexity"] = lambda: _perplexity(perplexity, original)
    if passkey:
        drawings["passkey"] = lambda: _passkey(passkey, original)
    if any(losses.values()):
        drawings["loss"] = lambda: _loss(losses)
    return drawings


def write_pictures(drawings: Drawings, folder: Path) -> list[Path]:
    """Draw each as a PNG.

    Raises:
        DataError: the folder cannot be written.
    """
    with themed(dark=False):
        return [file for name, draw in drawings.items() for file in save(draw(), folder, name, ("png",))]


def _perplexity(models: Mapping[str, Json], original: int | None) -> Any:
    figure, axes = _new()
    for (name, scores), style in zip(models.items(), _styles(models), strict=True):
        windows = scores["windows"]
        axes.plot([row["window"] for row in windows], [row["perplexity"] for row in windows], label=name, **style)
    axes.set(xscale="log", yscale="log", xlabel="window (tokens)", ylabel="perplexity (lower is better)")
    ticks = sorted({row["window"] for scores in models.values() for row in scores["windows"]})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    levels = marks(*axes.get_ylim())
    axes.set_yticks(levels, [f"{level:g}" for level in levels])
    axes.minorticks_off()
    _finish(figure, axes, original)
    return figure


def marks(low: float, high: float) -> list[float]:
    """Round numbers to mark an axis of logarithms with, also where it is shorter than an octave."""
    from matplotlib.ticker import MaxNLocator

    coarse = [first * 10**power for power in range(5) for first in (1, 1.5, 2, 3, 5, 7)]
    levels = coarse if high > 3 * low else [round(float(each), 6) for each in MaxNLocator(5).tick_values(low, high)]
    return [level for level in levels if low <= level <= high]


def _passkey(models: Mapping[str, Json], original: int | None) -> Any:
    figure, axes = _new()
    for (name, scores), style in zip(models.items(), _styles(models), strict=True):
        depths = scores["depths"]
        label = f"{name}: k_max {scores['k_max']:,}"
        axes.plot([row["k"] for row in depths], [100 * row["success_rate"] for row in depths], label=label, **style)
    axes.set(xlabel="distance of the passkey (tokens)", ylabel="retrieved (%)", ylim=(-4, 104))
    _finish(figure, axes, original)
    return figure


def _loss(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    figure, axes = _new()
    for (name, lines), style in zip(runs.items(), _styles(runs), strict=True):
        axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], label=name, color=style["color"])
    axes.set(xlabel="step", ylabel="training loss (nats a token)")
    if len(runs) > 1:
        _finish(figure, axes, None)
    else:
        plain(axes)
    return figure


def _new() -> tuple[Any, Any]:
    figure = new_figure(*SIZE)
    return figure, figure.subplots()


def _finish(figure: Any, axes: Any, original: int | None) -> None:
    """Grid, the window before stretching, and a legend above the axes, where it hides no curve."""
    if original:
        axes.axvline(original, color="0.55", linestyle=":", linewidth=1.2, label="window before stretching")
    plain(axes)
    figure.legend(frameon=False, loc="outside upper left", ncols=2, fontsize=10)


def _styles(curves: Mapping[str, object]) -> list[dict[str, Any]]:
    chosen = islice(cycle(STYLES), len(curves))
    return [{"color": colour, "marker": marker, "markersize": 5} for colour, marker in chosen]
