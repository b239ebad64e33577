"""Results as the lines and tables of a card, and as the hub's `model-index`; the one place that tells kinds apart."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from huggingface_hub import EvalResult

from pi_lora.evaluation import results
from pi_lora.evaluation.results import Scores
from pi_lora.report.run import TUNED, Run, Stages
from pi_lora.run_folder import SCORES


@dataclass(frozen=True)
class Figure:
    """A number of a result: its column and cell in a table, and the hub's words for it; `order` sorts the columns."""

    heading: str
    cell: str
    value: float
    data: str
    metric: str
    about: str
    order: int = 0


class Summary(NamedTuple):
    """A result in words, and its numbers."""

    words: str
    figures: list[Figure]


def summary(scores: Scores) -> Summary:
    """Return what cards, tables and the hub show of a result."""
    figures: list[Figure] = []
    end = ""
    match scores:
        case results.PerplexityScores(data=data, stride=stride, windows=rows):
            for window, value in ((row.window, row.perplexity) for row in rows):
                about = f"perplexity at {window} tokens, stride {stride}"
                figures.append(Figure(f"{window:,} tokens", f"{value:.2f}", value, data, "perplexity", about, window))
            found = ", ".join(f"{row.perplexity:.3f} at {row.window:,}" for row in rows)
            return Summary(f"perplexity {found} tokens; stride {stride}", figures)
        case results.PasskeyScores(k_max=k_max, target=target, depths=depths):
            found, data = f"{k_max:,} of {target:,}", f"passkey retrieval in {target} tokens"
            figure = Figure("k_max", found, k_max, data, "k_max", "k_max in tokens")
            return Summary(f"passkey k_max {found} tokens, {len(depths)} depths", [figure])
        case results.BenchmarkScores(tasks=tasks):
            figures = [figure for task, score in tasks.items() for figure in _task(task, score)]
        case results.SummarizationScores(data=source):
            data = source if isinstance(source, str) else str(source.get("name", ""))
            rouge = {name: getattr(scores, name) for name in ("rouge1", "rouge2", "rougeL")}
            figures = [Figure(name, f"{value:.2f}", value, data, name, name) for name, value in rouge.items()]
            end = f" over {scores.examples:,} examples"
        case _:
            raise TypeError(type(scores).__name__)
    return Summary(", ".join(f"{each.heading} {each.cell}" for each in figures) + end, figures)


def _task(task: str, score: results.TaskScore) -> Iterator[Figure]:
    if score.acc is not None:
        error = "" if score.stderr is None else f" ± {score.stderr:.3f}"
        yield Figure(task, f"{score.acc:.3f}{error}", score.acc, task, "accuracy", "accuracy, zero-shot")
    for metric, value in (score.metrics or {}).items():
        yield Figure(f"{task} {metric}", f"{value:.3f}", value, task, metric, f"{metric}, zero-shot")


def score_lines(run: Run) -> Iterator[str]:
    """Yield a line for each result of the tuned model; of those taken during training only for the last step."""
    for name, (stage, scores) in run.results.items():
        text = summary(scores).words if scores else f"in `{SCORES}/{name}.json`"
        yield f"- **{name}**: {text}" + (f" ({stage})" if stage != TUNED else "")


def stage_tables(run: Run) -> Iterator[str]:
    """Yield a table of base, step 0, ... and tuned model for each measurement made at more than one stage."""
    for name, stages in run.scores.items():
        if sum(scores is not None for scores in stages.values()) > 1:
            yield side_by_side(name, stages)


def side_by_side(name: str, rows: Stages) -> str:
    """Return a measurement of several models or stages as a Markdown table; what was not measured stays empty."""
    figures = {row: summary(scores).figures for row, scores in rows.items() if scores}
    orders = {figure.heading: figure.order for each in figures.values() for figure in each}
    headings = sorted(orders, key=orders.__getitem__)
    cells = {row: {figure.heading: figure.cell for figure in each} for row, each in figures.items()}
    return markdown_table([name, *headings], [[row, *(cells[row].get(each, "") for each in headings)] for row in cells])


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    first, *others = (f"| {' | '.join(cells)} |\n" for cells in (head, *rows))
    return first + "|---" * len(head) + "|\n" + "".join(others)


def eval_results(run: Run) -> list[EvalResult]:
    """Return every result of the tuned model for the hub; results of the base are not the run's own."""
    return [
        EvalResult("text-generation", _slug(each.data), each.data, each.metric, each.value, metric_name=each.about)
        for _, scores in run.results.values()
        if scores
        for each in summary(scores).figures
    ]


def _slug(name: str) -> str:
    """Return a name in the spelling of the hub's own.

    >>> _slug("builtin:stdlib"), _slug("monology/pile-uncopyrighted")
    ('builtin-stdlib', 'monology/pile-uncopyrighted')
    """
    return re.sub(r"[^\w./-]+", "-", name).strip("-")
