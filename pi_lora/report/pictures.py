"""Pictures of runs and models: a curve for each model in every measurement that has one, and loss against step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pi_lora.drawing import STYLES, new_figure, plain, save
from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.registry import MEASUREMENTS
from pi_lora.report.run import MeasuredRun, columns_of
from pi_lora.report.tables import literal

PICTURES = "pictures"
# Inches; narrow enough that the letters can be read on a phone.
WIDTH, HEIGHT = 5.0, 3.7

# Draws on axes.
Panel = Callable[[Any], None]


def draw_runs(runs: Sequence[MeasuredRun], folder: Path) -> Iterator[Path]:
    """Draw the scores of one run and its base, or of several runs, into `folder`; yield each file."""
    columns = columns_of(runs)
    originals = {run.original for run in runs}
    original = originals.pop() if len(originals) == 1 else None
    for name in dict.fromkeys(name for results in columns.values() for name in results):
        scores = {label: results[name] for label, results in columns.items() if name in results}
        figure = figure_of(partial(_curves, scores, original))
        if figure.axes[0].has_data():
            yield save(figure, folder / PICTURES / f"{name}.png")
    if losses := {run.name: run.log for run in runs if run.log}:
        yield save(figure_of(partial(_losses, losses)), folder / PICTURES / "loss.png")


def comparison_picture(measurements: Sequence[Mapping[str, Scores]], original: int, file: Path) -> None:
    """Draw several models, a panel for each measurement; raise DataError if the file cannot be written."""
    save(figure_of(*(partial(_curves, scores, original) for scores in measurements)), file)


def picture_lines(folder: Path) -> Iterator[str]:
    """Yield a line of Markdown for each picture in a folder."""
    for file in sorted((folder / PICTURES).glob("*.png")):
        yield f"![{literal(file.stem)}]({PICTURES}/{quote(file.name)})"


def figure_of(*panels: Panel) -> Any:
    """Return a figure of panels side by side, each with its legend above it, where it hides no curve."""
    figure = new_figure(WIDTH * len(panels), HEIGHT)
    for part, panel in zip(figure.subfigures(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes = part.subplots()
        panel(axes)
        plain(axes)
        if axes.get_legend_handles_labels()[0]:
            part.legend(frameon=False, loc="outside upper left", ncols=2, fontsize=10 if len(panels) == 1 else 8)
    return figure


def _curves(scores: Mapping[str, Scores], original: int | None, axes: Any) -> None:
    MEASUREMENTS[next(iter(scores.values())).measurement].draw(axes, scores)
    if axes.lines and original:
        axes.axvline(original, color="0.55", linestyle=":", linewidth=1.2, label="original window")


def _losses(logs: Mapping[str, Sequence[Mapping[str, Any]]], axes: Any) -> None:
    for (label, lines), (colour, _) in zip(logs.items(), cycle(STYLES), strict=False):
        axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], color=colour, label=label)
    axes.set(xlabel="step", ylabel="training loss (nats per token)")
