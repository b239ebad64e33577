"""Results as the lines and tables of a card, beside the paper's, and as the hub's `model-index`."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import EvalResult

from pi_lora.evaluation import results
from pi_lora.evaluation.results import Scores
from pi_lora.evaluation.ruler.effective import PAPERS_THRESHOLD, SHARE_OF_BASE
from pi_lora.recipe.schema import Recipe
from pi_lora.report.run import MeasuredRun, Stages
from pi_lora.run import SCORES, TUNED

WINDOWS = (2048, 4096, 8192, 16384, 32768)
# Where columns stand that have no window: behind all that do.
LAST = 10**12
SIZES = {"7b": "7B", "13b": "13B", "30b": "33B", "33b": "33B", "65b": "65B"}


class Measured(NamedTuple):
    """Perplexity at `WINDOWS` up to the target (tables 1 and 2), and k_max after 1,000 steps (table 4)."""

    pg19: tuple[float, ...]
    proof_pile: tuple[float, ...]
    k_max: int | None = None


# By size, target window and method.
PAPER: dict[tuple[str, int, str], Measured] = {
    ("7B", 8192, "direct"): Measured((7.21, 7.34, 7.69), (2.85, 2.74, 2.73), 2304),
    ("7B", 8192, "pi"): Measured((7.13, 6.96, 6.95), (2.79, 2.57, 2.39), 8192),
    ("7B", 16384, "pi"): Measured((7.11, 6.93, 6.82, 6.83), (2.79, 2.57, 2.37, 2.25), 16384),
    ("7B", 32768, "pi"): Measured((7.23, 7.04, 6.91, 6.80, 6.77), (2.82, 2.59, 2.39, 2.24, 2.48), 32768),
    ("13B", 8192, "direct"): Measured((6.56, 6.57, 6.69), (2.71, 2.56, 2.50)),
    ("13B", 8192, "pi"): Measured((6.55, 6.42, 6.42), (2.67, 2.47, 2.30)),
    ("13B", 16384, "pi"): Measured((6.56, 6.42, 6.31, 6.32), (2.68, 2.47, 2.29, 2.18)),
    ("13B", 32768, "pi"): Measured((6.54, 6.40, 6.28, 6.18, 6.09), (2.68, 2.46, 2.28, 2.15, 2.35)),
    ("33B", 8192, "direct"): Measured((5.88, 5.99, 6.21), (2.56, 2.48, 2.47), 2304),
    ("33B", 8192, "pi"): Measured((5.82, 5.69, 5.71), (2.50, 2.32, 2.18), 8192),
    ("33B", 16384, "pi"): Measured((5.87, 5.74, 5.67, 5.68), (2.53, 2.34, 2.18, 2.07), 16384),
    ("65B", 8192, "pi"): Measured((5.42, 5.32, 5.37), (2.43, 2.26, 2.12)),
}


class Figure(NamedTuple):
    """A number of a result: its column and cell in a table, and the hub's words for it; `order` sorts the columns."""

    heading: str
    cell: str
    value: float
    data: str
    metric: str
    about: str
    order: int = 0


def summary(scores: Scores) -> tuple[str, list[Figure]]:
    """Return what cards, tables and the hub show of a result: the words, and the numbers."""
    figures: list[Figure] = []
    end = ""
    match scores:
        case results.PerplexityScores(data=data, stride=stride, windows=rows):
            for window, value in ((row.window, row.perplexity) for row in rows):
                about = f"perplexity at {window} tokens, stride {stride}"
                figures.append(Figure(f"{window:,} tokens", f"{value:.2f}", value, data, "perplexity", about, window))
            found = ", ".join(f"{row.perplexity:.3f} at {row.window:,}" for row in rows)
            bits = ", ".join(f"{row.bits_per_byte:.3f}" for row in rows if row.bits_per_byte)
            in_bits = f" ({bits} bits per byte)" if bits else ""
            return f"perplexity {found} tokens{in_bits}; stride {stride}", figures
        case results.PasskeyScores(k_max=k_max, target=target, depths=depths):
            found, data = f"{k_max:,} of {target:,}", f"passkey retrieval in {target} tokens"
            figure = Figure("k_max", found, k_max, data, "k_max", "k_max in tokens")
            return f"passkey k_max {found} tokens, {len(depths)} depths", [figure]
        case results.PasskeyMap(lengths=lengths):
            for each in lengths:
                data = f"passkey retrieval in {each.target} tokens"
                heading, cell = f"k_max in {each.target:,}", f"{each.k_max:,}"
                figures.append(Figure(heading, cell, each.k_max, data, "k_max", "k_max in tokens", each.target))
            found = ", ".join(f"{each.k_max:,} in {each.target:,}" for each in lengths)
            return f"passkey k_max {found} tokens, {len(lengths[0].depths)} depths", figures
        case results.BenchmarkScores(tasks=tasks):
            figures = [figure for task, score in tasks.items() for figure in _task(task, score)]
        case results.RulerScores():
            figures = list(_ruler(scores))
            found = ", ".join(f"{each.cell} at {each.heading}" for each in figures if each.metric == "score")
            reached = ", ".join(f"{each.heading} {each.cell}" for each in figures if each.metric != "score")
            return f"RULER {found}; {reached}", figures
        case results.SummarizationScores(data=source):
            data = source if isinstance(source, str) else str(source.get("name", ""))
            rouge = {name: getattr(scores, name) for name in ("rouge1", "rouge2", "rougeL")}
            figures = [Figure(name, f"{value:.2f}", value, data, name, name) for name, value in rouge.items()]
            end = f" over {scores.examples:,} examples"
        case _:
            raise TypeError(type(scores).__name__)
    return (", ".join(f"{each.heading} {each.cell}" for each in figures) or "no scores") + end, figures


def _task(task: str, score: results.TaskScore) -> Iterator[Figure]:
    if score.acc is not None:
        error = "" if score.stderr is None else f" ± {score.stderr:.3f}"
        yield Figure(task, f"{score.acc:.3f}{error}", score.acc, task, "accuracy", "accuracy, zero-shot")
    for metric, value in (score.metrics or {}).items():
        yield Figure(f"{task} {metric}", f"{value:.3f}", value, task, metric, f"{metric}, zero-shot")


def _ruler(scores: results.RulerScores) -> Iterator[Figure]:
    for each in scores.lengths:
        error = "" if each.stderr is None else f" ± {200 * each.stderr:.1f}"
        data, value = f"RULER, {len(each.tasks)} tasks at {each.window} tokens", 100 * each.score
        heading = f"{each.window:,} tokens"
        yield Figure(heading, f"{value:.1f}{error}", value, data, "score", "mean score in %", each.window)
    lengths = {f"effective length ({PAPERS_THRESHOLD:.1%})": scores.effective_length}
    if (found := scores.relative) is not None:
        lengths[f"effective length ({SHARE_OF_BASE:.0%} of the base at {found.window:,})"] = found.effective_length
    for heading, length in lengths.items():
        yield Figure(heading, f"{length:,}", length, "RULER", "effective length", f"{heading}, in tokens", LAST)


def score_lines(run: MeasuredRun) -> Iterator[str]:
    """Yield a line for each result of the tuned model; of those taken during training only for the last step."""
    for name, (stage, scores) in run.results.items():
        text = literal(summary(scores)[0]) if scores else f"in `{SCORES}/{name}.json`"
        yield f"- **{literal(name)}**: {text}" + (f" ({stage})" if stage != TUNED else "")


def side_by_side(name: str, rows: Stages) -> str:
    """Return a measurement of several models or stages as a Markdown table; what was not measured stays empty."""
    figures = {row: summary(scores)[1] for row, scores in rows.items() if scores}
    orders = {figure.heading: figure.order for each in figures.values() for figure in each}
    headings = sorted(orders, key=orders.__getitem__)
    cells = {row: {figure.heading: figure.cell for figure in each} for row, each in figures.items()}
    return markdown_table([name, *headings], [[row, *(cells[row].get(each, "") for each in headings)] for row in cells])


def public_name(name: str) -> str:
    """Return a name as strangers may read it: the last part of a path on this machine, and any other name as it is.

    >>> public_name("/home/me/books/*.txt"), public_name("~/base"), public_name("owner/base")
    ('*.txt', 'base', 'owner/base')
    """
    local = name.startswith(("/", "~", ".")) or os.path.exists(name)
    return Path(name).name or name if local else name


def literal(text: str) -> str:
    r"""Return a text, which may come from elsewhere, as Markdown that shows it: no images, links, HTML or cells in it.

    >>> print(literal("![](http://x/y.png) <b> a|b"))
    \!\[\](http://x/y.png) \<b> a\|b
    """
    return re.sub(r"([\\`!\[\]<|])", r"\\\1", " ".join(text.split()))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]), end="")
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    first, *others = (f"| {' | '.join(map(literal, cells))} |\n" for cells in (head, *rows))
    return first + "|---" * len(head) + "|\n" + "".join(others)


def paper_section(recipe: Recipe) -> str:
    """Return what the paper measured of the same LLaMA, known by its name, window and method; empty if nothing."""
    name = recipe.model.name.rpartition("/")[2].lower()
    size = SIZES.get(name.removeprefix("llama-"), "") if name.startswith("llama-") else ""
    target = recipe.context.target
    if not (found := PAPER.get((size, target, recipe.scaling))):
        return ""
    tables = {"PG-19 (table 1)": found.pg19, "proof-pile (table 2)": found.proof_pile}
    rows = markdown_table(
        ["paper", *(f"{window:,} tokens" for window in WINDOWS if window <= target)],
        [[name, *(f"{each:.2f}" for each in values)] for name, values in tables.items()],
    )
    k_max = f"\nk_max {found.k_max:,} of {target:,} after 1,000 steps (table 4)." if found.k_max else ""
    return f"LLaMA-{size} to {target:,} tokens, full tuning. Only results on the same data compare.\n\n{rows}{k_max}"


def eval_results(run: MeasuredRun) -> list[EvalResult]:
    """Return every result of the tuned model for the hub; results of the base are not the run's own."""
    found: list[EvalResult] = []
    for scores in (scores for _, scores in run.results.values() if scores):
        for each in summary(scores)[1]:
            name = public_name(each.data)
            data = re.sub(r"[^\w./-]+", "-", name).strip("-")  # as the hub spells its own
            found.append(EvalResult("text-generation", data, name, each.metric, each.value, metric_name=each.about))
    return found
