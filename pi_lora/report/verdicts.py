"""What a stretch gained and cost: a base and its run side by side, a 95 % interval and a plain verdict for each row.

Both models read the same documents, prompts and examples, so their differences are paired where both results hold each
one: their spread decides, not that of the models' own scores, most of which is common to both.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Literal

from rich.table import Table

from pi_lora.evaluation.results import BenchmarkScores, PasskeyScores, PerplexityScores, Result, RulerScores, Scores
from pi_lora.evaluation.ruler.effective import PAPERS_THRESHOLD, SHARE_OF_BASE, relative_to

# Student's t for 95 % by degrees of freedom, from 1.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
NORMAL_95 = 1.96
Interval = tuple[float, float]
Unit = Literal["%", "points", "tokens"]


class Row(Result):
    """A number of a base and of its run: by how much it changed, in `unit`, with the 95 % interval if there is one.
    `pairs` are the documents, trials or examples whose differences gave it; None if it is of two standard errors.
    """

    measurement: str
    base: float
    run: float
    unit: Unit
    change: float
    interval: Interval | None = None
    pairs: int | None = None
    verdict: str


def quantile(pairs: int) -> float:
    """Return how many standard errors a 95 % interval of the mean of `pairs` differences reaches to each side.

    >>> [round(quantile(pairs), 2) for pairs in (2, 3, 11, 24, 1000)]
    [12.71, 4.3, 2.23, 2.1, 2.0]
    """
    freedom = pairs - 1
    return T_95[freedom - 1] if freedom <= len(T_95) else 2 + 2.3 / freedom


def of_means(differences: Sequence[float], weights: Sequence[float]) -> tuple[float, Interval | None]:
    """Return the weighted mean of differences with its 95 % interval, of a ratio estimator; None of fewer than two.

    >>> of_means([0.1, 0.1], [1, 3])
    (0.1, (0.1, 0.1))
    """
    total, number = sum(weights), len(differences)
    mean = sum(weight * each for weight, each in zip(weights, differences, strict=True)) / total
    if number < 2:
        return mean, None
    squares = sum((weight * (each - mean)) ** 2 for weight, each in zip(weights, differences, strict=True))
    reach = quantile(number) * math.sqrt(squares * number / (number - 1)) / total
    return mean, (mean - reach, mean + reach)


def of_pairs(before: Sequence[bool], after: Sequence[bool]) -> tuple[float, Interval]:
    """Return how much more often something succeeds, with the 95 % interval of Bonett and Price (2012), which is not
    empty where all pairs agree.

    >>> of_pairs([False] * 8, [True] * 8)[0]
    1.0
    """
    number = len(before)
    gained = sum(b < a for b, a in zip(before, after, strict=True))
    lost = sum(b > a for b, a in zip(before, after, strict=True))
    more, less = (gained + 1) / (number + 2), (lost + 1) / (number + 2)
    reach = NORMAL_95 * math.sqrt((more + less - (more - less) ** 2) / (number + 2))
    return (gained - lost) / number, (max(-1, more - less - reach), min(1, more - less + reach))


def unpaired(before: float, after: float, *errors: float | None) -> tuple[float, Interval | None]:
    """Return a difference with the interval of two standard errors; None if one of them is not known."""
    known = [each for each in errors if each is not None]
    reach = 2 * math.hypot(*known)
    return after - before, (after - before - reach, after - before + reach) if len(known) == len(errors) else None


def compare(base: Scores, run: Scores, original: int | None = None) -> Iterator[Row]:
    """Yield rows of two results of one kind; `original` (L, tokens) tells the old window from what is beyond it."""
    if isinstance(base, PerplexityScores) and isinstance(run, PerplexityScores):
        yield from _perplexity(base, run, original)
    elif isinstance(base, PasskeyScores) and isinstance(run, PasskeyScores):
        yield from _passkey(base, run)
    elif isinstance(base, BenchmarkScores) and isinstance(run, BenchmarkScores):
        yield from _benchmarks(base, run)
    elif isinstance(base, RulerScores) and isinstance(run, RulerScores):
        yield from _ruler(base, run, original)


def verdict(change: float, interval: Interval | None, unit: Unit, lower_is_better: bool = False) -> str:
    """Return a change in plain words.

    >>> verdict(3.14, (1.0, 5.0), "%", lower_is_better=True), verdict(-2.0, (-4.0, 0.5), "points")
    ('3.1 % worse', 'within noise')
    """
    if interval is not None and interval[0] <= 0 <= interval[1]:
        return "within noise"
    if change == 0:
        return "the same"
    if unit == "tokens":
        return f"{abs(change):,.0f} tokens {'longer' if change > 0 else 'shorter'}"
    word = "worse" if (change > 0) == lower_is_better else "better"
    return f"{abs(change):.1f} {unit} {word}" + (", no interval" if interval is None else "")


def verdict_table(base: str, run: str, rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table(title=f"{base} beside {run}")
    for heading in ("", "base", "run", "change", "95 % interval"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("verdict")
    for row in rows:
        digits = ",.0f" if row.unit == "tokens" else ".3f" if row.unit == "%" else ".1f"
        low_high = "" if row.interval is None else "{:+.1f} to {:+.1f}".format(*row.interval)
        change = f"{row.change:+,.0f}" if row.unit == "tokens" else f"{row.change:+.1f}"
        cells = (f"{row.base:{digits}}", f"{row.run:{digits}}", f"{change} {row.unit}", low_high)
        table.add_row(row.measurement, *cells, row.verdict)
    table.caption = "intervals of differences paired by document, trial or example, or else two standard errors"
    return table


def _perplexity(base: PerplexityScores, run: PerplexityScores, original: int | None) -> Iterator[Row]:
    """By window: the change of the mean loss, of which each document's tokens have the same weight."""
    documents = {(each.name, each.tokens): each for each in base.per_document or ()}
    both = [(documents.get((each.name, each.tokens)), each) for each in run.per_document or ()]
    rows = {row.window: row for row in base.windows}
    for row in (row for row in run.windows if row.window in rows):
        before = rows[row.window]
        found = [
            (math.log(own.perplexity / its.perplexity), own.tokens)
            for one, other in both
            for its in (one.windows if one else ())
            for own in other.windows
            if own.window == its.window == row.window
        ]
        paired = len(found) == len(documents) == len(both) > 0
        _, interval = of_means(*zip(*found, strict=True)) if paired else (0.0, None)
        change = _percent(math.log(row.perplexity / before.perplexity))
        yield _row(
            f"perplexity at {row.window:,}{_place(row.window, original)}",
            (before.perplexity, row.perplexity),
            change,
            interval and (_percent(interval[0]), _percent(interval[1])),
            "%",
            len(found) if paired else None,
            lower_is_better=True,
        )


def _passkey(base: PasskeyScores, run: PasskeyScores) -> Iterator[Row]:
    what = f"passkeys in {run.target:,}"
    if base.target != run.target:
        return
    outcomes = {depth.k: depth.outcomes or [] for depth in base.depths if base.seed == run.seed}
    pairs = [
        pair for depth in run.depths for pair in zip(outcomes.get(depth.k, []), depth.outcomes or [], strict=False)
    ]
    if pairs:
        before, after = zip(*pairs, strict=True)
        change, interval = of_pairs(before, after)
        yield _points(what, fmean(before), fmean(after), change, interval, len(pairs))
    yield _row(f"k_max of {run.target:,}", (base.k_max, run.k_max), run.k_max - base.k_max, None, "tokens")


def _benchmarks(base: BenchmarkScores, run: BenchmarkScores) -> Iterator[Row]:
    for task, after in run.tasks.items():
        before = base.tasks.get(task)
        if before is None or before.acc is None or after.acc is None:
            continue
        if before.outcomes and after.outcomes and len(before.outcomes) == len(after.outcomes):
            found = of_pairs([each == 1 for each in before.outcomes], [each == 1 for each in after.outcomes])
            yield _points(task, before.acc, after.acc, *found, len(after.outcomes))
        else:
            yield _points(task, before.acc, after.acc, *unpaired(before.acc, after.acc, before.stderr, after.stderr))


def _ruler(base: RulerScores, run: RulerScores, original: int | None) -> Iterator[Row]:
    """By window: the mean of the tasks that both were measured on, each of the same weight."""
    windows = {each.window: each.tasks for each in base.lengths}
    for each in (each for each in run.lengths if each.window in windows):
        tasks = [
            (windows[each.window][name], task) for name, task in each.tasks.items() if name in windows[each.window]
        ]
        if not tasks:
            continue
        before, after = (fmean(pair[side].score for pair in tasks) for side in (0, 1))
        what = f"RULER at {each.window:,}{_place(each.window, original)}, {len(tasks)} tasks"
        if base.seed == run.seed and all(b.length == a.length and b.outcomes and a.outcomes for b, a in tasks):
            differences = [[y - x for x, y in zip(b.outcomes or (), a.outcomes or (), strict=False)] for b, a in tasks]
            fewest = min(map(len, differences))
            errors = [stdev(every) / math.sqrt(len(every)) if len(every) > 1 else math.inf for every in differences]
            reach = quantile(max(2, fewest)) * math.hypot(*errors) / len(tasks)
            interval = (after - before - reach, after - before + reach) if fewest > 1 else None
            yield _points(what, before, after, after - before, interval, sum(map(len, differences)))
        else:
            errors_of = [math.hypot(*(pair[side].stderr or math.inf for pair in tasks)) / len(tasks) for side in (0, 1)]
            known = [error if math.isfinite(error) else None for error in errors_of]
            yield _points(what, before, after, *unpaired(before, after, *known))
    lengths = {f"effective length, {PAPERS_THRESHOLD:.1%}": (base.effective_length, run.effective_length)}
    if (own := relative_to(base, base).relative) and (its := relative_to(base, run).relative):
        of_base = f"effective length, {SHARE_OF_BASE:.0%} of the base"
        lengths[of_base] = (own.effective_length, its.effective_length)
    for what, reached in lengths.items():
        yield _row(what, reached, reached[1] - reached[0], None, "tokens")


def _points(
    what: str, before: float, after: float, change: float, interval: Interval | None, pairs: int | None = None
) -> Row:
    in_percent = interval and (100 * interval[0], 100 * interval[1])
    return _row(f"{what}, %", (100 * before, 100 * after), 100 * change, in_percent, "points", pairs)


def _row(
    what: str,
    values: tuple[float, float],
    change: float,
    interval: Interval | None,
    unit: Unit,
    pairs: int | None = None,
    lower_is_better: bool = False,
) -> Row:
    return Row(
        measurement=what,
        base=values[0],
        run=values[1],
        unit=unit,
        change=change,
        interval=interval,
        pairs=pairs,
        verdict=verdict(change, interval, unit, lower_is_better),
    )


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)


def _place(window: int, original: int | None) -> str:
    return "" if original is None else " (old window)" if window <= original else " (beyond)"
