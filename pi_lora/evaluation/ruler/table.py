"""RULER as a table, and as a picture of small multiples: score against length, the mean first."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.table import Table

from pi_lora.drawing import STYLES, new_figure, plain, save
from pi_lora.evaluation.results import RulerScores, RulerTask, RulerWindow
from pi_lora.evaluation.ruler.effective import PAPERS_THRESHOLD, SHARE_OF_BASE

COLUMNS = 4
ALL_TASKS = 13


def ruler_table(*models: RulerScores) -> Table:
    """Return scores in percent by task and window, a line for each model, and the means with two standard errors."""
    first, alone = models[0], len(models) == 1
    names, windows = _names(models), sorted({each.window for scores in models for each in scores.lengths})
    table = Table(title=f"{first.model}: RULER in %" if alone else "RULER in %")
    table.add_column("task")
    if not alone:
        table.add_column("model", overflow="fold")
    for window in windows:
        table.add_column(f"{window:,}", justify="right")
    for name in [*names, "mean"]:
        for scores in models:
            by_window = {each.window: each.tasks.get(name) if name in names else each for each in scores.lengths}
            cells = [_cell(by_window.get(window), with_error=name not in names) for window in windows]
            table.add_row(name if scores is first else "", *([] if alone else [scores.model]), *cells)
        if name == names[-1] or not alone:
            table.add_section()
    table.caption = "; ".join([*map(_lengths, models), _about(first)])
    return table


def ruler_figure(models: Mapping[str, RulerScores]) -> Any:
    """Return a figure of score against length, a curve for each model: the mean with the threshold, and each task."""
    names = _names(list(models.values()))
    across = min(COLUMNS, len(names) + 1)
    rows = -(-(len(names) + 1) // across)
    figure = new_figure(2.6 * across, 2.2 * rows + 0.5)
    panels = figure.subplots(rows, across, sharex=True, sharey=True, squeeze=False).flat
    for name, axes in zip(["mean", *names], panels, strict=False):
        for (model, scores), (colour, marker) in zip(models.items(), cycle(STYLES), strict=False):
            found = {each.window: each.tasks.get(name) if name in names else each for each in scores.lengths}
            points = [(window, 100 * score.score) for window, score in found.items() if score]
            if points:
                label = model if name == "mean" else None
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=label)
        if name == "mean":
            axes.axhline(100 * PAPERS_THRESHOLD, color="0.55", linestyle=":", linewidth=1.2)
        axes.set(xscale="log", ylim=(-4, 104))
        plain(axes, name)
    windows = sorted({each.window for scores in models.values() for each in scores.lengths})
    for axes in figure.axes:
        axes.set_xticks(windows, [f"{window // 1024}k" if window % 1024 == 0 else f"{window:,}" for window in windows])
        axes.minorticks_off()
    for axes in figure.axes[len(names) + 1 - across : len(names) + 1]:  # the last of each column
        axes.xaxis.set_tick_params(labelbottom=True)
    for axes in figure.axes[len(names) + 1 :]:
        axes.set_visible(False)
    figure.supxlabel("window (tokens)", fontsize=10)
    figure.supylabel("score (%)", fontsize=10)
    figure.legend(frameon=False, loc="outside upper left", ncols=2, fontsize=9)
    return figure


def ruler_picture(models: Sequence[RulerScores], file: Path) -> None:
    """Draw the scores of several models as a PNG."""
    save(ruler_figure({scores.model: scores for scores in models}), file)


def _names(models: Sequence[RulerScores]) -> list[str]:
    return list(dict.fromkeys(name for scores in models for each in scores.lengths for name in each.tasks))


def _cell(score: RulerTask | RulerWindow | None, with_error: bool) -> str:
    if score is None:
        return ""
    error = f" ± {200 * score.stderr:.1f}" if with_error and score.stderr is not None else ""
    return f"{100 * score.score:.1f}{error}"


def _lengths(scores: RulerScores) -> str:
    """The effective lengths of a model in words."""
    found = f"{scores.model}: effective length {scores.effective_length:,} ({PAPERS_THRESHOLD:.1%})"
    if scores.relative is None:
        return found
    score = f"{scores.relative.base}'s {100 * scores.relative.score:.1f} at {scores.relative.window:,}"
    share = f"{SHARE_OF_BASE:.0%} of {score}"
    return f"{found}, {scores.relative.effective_length:,} ({share})"


def _about(scores: RulerScores) -> str:
    tasks = len(_names([scores]))
    of = "" if tasks == ALL_TASKS else f" of {ALL_TASKS}"
    left_out = f", left out for want of text: {', '.join(scores.left_out)}" if scores.left_out else ""
    template = "chat template" if scores.chat_template else "no chat template"
    each = f"{scores.samples} samples a task and window, seed {scores.seed}"
    return f"{tasks}{of} tasks{left_out}; {each}; {template}, {scores.dtype}, lm-eval {scores.lm_eval}; ± two errors"
