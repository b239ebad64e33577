"""Pictures of runs and models: perplexity and RULER against window, passkeys against distance, loss against step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from pi_lora.drawing import STYLES, new_figure, plain, save
from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.registry import MEASUREMENTS
from pi_lora.report.run import MeasuredRun, columns_of

PICTURES = "pictures"
# What each picture shows, for those who do not see it.
CAPTIONS = {
    "perplexity": "Perplexity against window",
    "passkey": "Passkeys retrieved against their distance",
    "passkey-lengths": "Passkeys retrieved by depth and length",
    "ruler": "RULER against window, the mean of its tasks",
    "loss": "Training loss against step",
}
# Inches; narrow enough that the letters can be read on a phone.
WIDTH, HEIGHT = 5.0, 3.7


def draw_runs(runs: Sequence[MeasuredRun], folder: Path) -> Iterator[Path]:
    """Draw the results that there are into `folder`, the stages of one run or the tuned models of several; yield each
    file.
    """
    for name, figure in _figures(runs).items():
        yield save(figure, folder / PICTURES / f"{name}.png")


def _figures(runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    columns = columns_of(runs)
    originals = {run.original for run in runs}
    original = originals.pop() if len(originals) == 1 else None
    figures: dict[str, Any] = {}
    for name in CAPTIONS:
        scores = {label: results[name] for label, results in columns.items() if name in results}
        if scores:
            figures[name] = _figure(partial(_draw, scores, original))
    if losses := {run.name: [(line["step"], line["loss"]) for line in run.log] for run in runs if run.log}:
        figures["loss"] = _figure(partial(_loss, losses))
    return figures


def comparison_picture(
    perplexity: Mapping[str, Scores], passkey: Mapping[str, Scores], original: int, file: Path
) -> None:
    """Draw perplexity and passkeys of several models side by side; raise DataError if the file cannot be written."""
    save(_figure(*(partial(_draw, scores, original) for scores in (perplexity, passkey))), file)


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


def _draw(scores: Mapping[str, Scores], original: int | None, axes: Any) -> None:
    """Draw the scores of one measurement by label, and a line at the original window."""
    [measurement] = {each.measurement for each in scores.values()}
    MEASUREMENTS[measurement].draw(axes, scores)
    if original and axes.lines:
        axes.axvline(original, color="0.55", linestyle=":", linewidth=1.2, label="original window")


def _loss(curves: Mapping[str, Sequence[tuple[float, float]]], axes: Any) -> None:
    for (label, points), (colour, _) in zip(curves.items(), cycle(STYLES), strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, label=label)
    axes.set(xlabel="step", ylabel="training loss (nats per token)")
