"""Pictures of a run: its scores beside those of its base, and the loss of its training."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pi_lora.drawing import VERMILION, Panel, figure_of, save
from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.registry import MEASUREMENTS
from pi_lora.report.run import MeasuredRun
from pi_lora.report.tables import groups_of, literal, public_setting

PICTURES = "pictures"


def draw_run(run: MeasuredRun, folder: Path) -> Iterator[Path]:
    """Draw the scores of a run and its base, and the loss of its training, into `folder`; yield each file."""
    columns = run.columns
    for name in sorted({name for results in columns.values() for name in results}):
        scores, *_ = groups_of(name, columns)  # what was measured otherwise is not drawn on the same axis
        if panels := _panels(scores, run.original):
            yield save(figure_of(*panels, title=public_setting(scores)), folder / PICTURES / f"{name}.png")
    if run.log:
        yield save(figure_of(partial(_loss, run.log)), folder / PICTURES / "loss.png")


def comparison_picture(measurements: Sequence[Mapping[str, Scores]], original: int, file: Path) -> None:
    """Draw several models, the first panel of each measurement; raise DataError if the file cannot be written."""
    save(figure_of(*(_panels(scores, original)[0] for scores in measurements)), file)


def picture_lines(folder: Path) -> Iterator[str]:
    """Yield a line of Markdown for each picture in a folder."""
    for file in sorted((folder / PICTURES).glob("*.png")):
        yield f"![{literal(file.stem)}]({PICTURES}/{quote(file.name)})"


def _panels(scores: Mapping[str, Scores], original: int | None) -> list[Panel]:
    panels = MEASUREMENTS[next(iter(scores.values())).measurement].panels(scores)
    return [partial(_with_window, panel, original) for panel in panels]


def _with_window(panel: Panel, original: int | None, axes: Any) -> None:
    panel(axes)
    if axes.lines and original:
        axes.axvline(original, color="0.55", linestyle=":", linewidth=1.2, label="original window")


def _loss(log: Sequence[Mapping[str, Any]], axes: Any) -> None:
    axes.plot([line["step"] for line in log], [line["loss"] for line in log], color=VERMILION)
    axes.set(xlabel="step", ylabel="training loss (nats per token)")
