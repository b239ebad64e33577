"""Pictures of runs and models: perplexity and RULER against window, passkeys against distance, loss against step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

from pi_lora.drawing import STYLES, new_figure, plain, round_levels, save
from pi_lora.evaluation.passkey.table import draw_passkey_map
from pi_lora.evaluation.results import PasskeyMap, PasskeyScores, PerplexityScores, RulerScores, Scores
from pi_lora.evaluation.ruler.table import ruler_figure
from pi_lora.report.run import MeasuredRun, columns_of

S = TypeVar("S", bound=Scores)
PICTURES = "pictures"
# The name of scores in a run that are a PasskeyMap.
LENGTHS = "passkey-lengths"
# What each picture shows, for those who do not see it.
CAPTIONS = {
    "perplexity": "Perplexity against window",
    "passkey": "Passkeys retrieved against their distance",
    "lengths": "Passkeys retrieved by depth and length",
    "ruler": "RULER against window, the mean and each task",
    "loss": "Training loss against step",
}
# Inches; narrow enough that the letters can be read on a phone.
WIDTH, HEIGHT = 5.0, 3.7

Curves = Mapping[str, Sequence[tuple[float, float]]]


def draw_runs(runs: Sequence[MeasuredRun], folder: Path) -> Iterator[Path]:
    """Draw the results that there are into `folder`, the stages of one run or the tuned models of several; yield each
    file.
    """
    for name, figure in _figures(runs).items():
        yield save(figure, folder / PICTURES / f"{name}.png")


def _figures(runs: Sequence[MeasuredRun]) -> dict[str, Any]:

    columns = columns_of(runs)

    def scores(name: str, kind: type[S]) -> dict[str, S]:
        named = {label: results.get(name) for label, results in columns.items()}
        return {label: found for label, found in named.items() if isinstance(found, kind)}

    originals = {run.original for run in runs}
    original = originals.pop() if len(originals) == 1 else None
    figures: dict[str, Any] = {}
    if perplexities := scores("perplexity", PerplexityScores):
        figures["perplexity"] = _figure(partial(_perplexity, perplexities, original))
    if passkeys := scores("passkey", PasskeyScores):
        figures["passkey"] = _figure(partial(_passkey, passkeys, original))
    if losses := {run.name: [(line["step"], line["loss"]) for line in run.log] for run in runs if run.log}:
        figures["loss"] = _figure(partial(_loss, losses))
    if maps := scores(LENGTHS, PasskeyMap):
        figures["lengths"] = _figure(*(partial(_lengths, name, scores) for name, scores in maps.items()))
    if rulers := scores("ruler", RulerScores):
        figures["ruler"] = ruler_figure(rulers)
    return figures


def comparison_picture(
    perplexity: Mapping[str, PerplexityScores], passkey: Mapping[str, PasskeyScores], original: int, file: Path
) -> None:
    """Draw perplexity and passkeys of several models side by side; raise DataError if the file cannot be written."""
    save(_figure(partial(_perplexity, perplexity, original), partial(_passkey, passkey, original)), file)


def picture_lines(folder: Path) -> Iterator[str]:
    """Yield a line of Markdown for each picture in a folder."""
    for name, caption in CAPTIONS.items():
        if (folder / PICTURES / f"{name}.png").is_file():
            yield f"![{caption}]({PICTURES}/{name}.png)"


def _figure(*panels: Callable[[Any], None]) -> Any:
    """A figure of panels side by side, each with its legend above it, where it hides no curve."""
    figure = new_figure(WIDTH * len(panels), HEIGHT)
    for part, panel in zip(figure.subfigures(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes = part.subplots()
        panel(axes)
        plain(axes)
        if axes.get_legend_handles_labels()[0]:
            part.legend(frameon=False, loc="outside upper left", ncols=2, fontsize=10 if len(panels) == 1 else 8)
    return figure


def _perplexity(models: Mapping[str, PerplexityScores], original: int | None, axes: Any) -> None:
    points = {name: [(row.window, row.perplexity) for row in each.windows] for name, each in models.items()}
    _curves(axes, points, original)
    axes.set(xscale="log", yscale="log", xlabel="window (tokens)", ylabel="perplexity (lower is better)")
    ticks = sorted({window for curve in points.values() for window, _ in curve})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    levels = round_levels(*axes.get_ylim())
    axes.set_yticks(levels, [f"{level:g}" for level in levels])
    axes.minorticks_off()


def _passkey(models: Mapping[str, PasskeyScores], original: int | None, axes: Any) -> None:
    points = {
        f"{name}: k_max {each.k_max:,}": [(row.k, 100 * row.success_rate) for row in each.depths]
        for name, each in models.items()
    }
    _curves(axes, points, original)
    axes.set(xlabel="distance of the passkey (tokens)", ylabel="retrieved (%)", ylim=(-4, 104))


def _lengths(name: str, found: PasskeyMap, axes: Any) -> None:
    draw_passkey_map(found, axes)
    axes.set_title(name, fontsize=11)


def _loss(points: Curves, axes: Any) -> None:
    _curves(axes, points, marked=False)
    axes.set(xlabel="step", ylabel="training loss (nats per token)")


def _curves(axes: Any, curves: Curves, original: int | None = None, marked: bool = True) -> None:
    """Draw a line for each label, and one at the original window."""
    for (label, points), (colour, marker) in zip(curves.items(), cycle(STYLES), strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker if marked else "", markersize=5, label=label)
    if original:
        axes.axvline(original, color="0.55", linestyle=":", linewidth=1.2, label="original window")
