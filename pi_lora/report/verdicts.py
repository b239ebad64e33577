"""What a stretch gained and cost: a base and its run side by side, with a 95 % interval and a verdict for each row.
Both models read the same documents, prompts and examples: where both results hold each one, differences are paired.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Literal

from rich.table import Table

from pi_lora.evaluation import results
from pi_lora.evaluation.results import Result, Scores
from pi_lora.evaluation.ruler.effective import PAPERS_THRESHOLD, SHARE_OF_BASE, mean_of, relative_to, standard_error

# Student's t for 95 % by degrees of freedom, from 1.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
NORMAL_95 = 1.96
Interval = tuple[float, float]
Unit = Literal["%", "points", "tokens"]


class Row(Result):
    """A number of a base and its run, and its change in `unit`. `pairs` are the documents, trials or examples whose
    differences gave the interval; None if it is of two standard errors.
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
    match base, run:
        case results.PerplexityScores(), results.PerplexityScores():
            yield from _perplexity(base, run, original)
        case results.PasskeyScores(), results.PasskeyScores():
            yield from _passkey(base, run)
        case results.BenchmarkScores(), results.BenchmarkScores():
            yield from _benchmarks(base, run)
        case results.RulerScores(), results.RulerScores():
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
    table = Table("", title=f"{base} beside {run}")
    for heading in ("base", "run", "change", "95 % interval"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for row in rows:
        digits = ",.0f" if row.unit == "tokens" else ".3f" if row.unit == "%" else ".1f"
        low_high = "" if row.interval is None else "{:+.1f} to {:+.1f}".format(*row.interval)
        change = f"{row.change:+,.0f}" if row.unit == "tokens" else f"{row.change:+.1f}"
        cells = (f"{row.base:{digits}}", f"{row.run:{digits}}", f"{change} {row.unit}", low_high)
        table.add_row(row.measurement, *cells, row.verdict)
    table.caption = "intervals of differences paired by document, trial or example, or else two standard errors"
    return table


def _perplexity(base: results.PerplexityScores, run: results.PerplexityScores, original: int | None) -> Iterator[Row]:
    """By window: the change of the mean loss, of which each document's tokens have the same weight."""
    rows = {row.window: row.perplexity for row in base.windows}
    for window, after in ((row.window, row.perplexity) for row in run.windows if row.window in rows):
        before, its, own = rows[window], _by_document(base, window), _by_document(run, window)
        interval = None
        if paired := its.keys() == own.keys() and len(own) > 0:
            ratios = [math.log(own[each].perplexity / its[each].perplexity) for each in own]
            if found := of_means(ratios, [each.tokens for each in own.values()])[1]:
                interval = _percent(found[0]), _percent(found[1])
        change = _percent(math.log(after / before))
        what = f"perplexity at {window:,}{_place(window, original)}"
        yield _row(what, before, after, change, interval, "%", len(own) if paired else None)


def _by_document(scores: results.PerplexityScores, window: int) -> dict[tuple[str, int], results.WindowPerplexity]:
    rows = ((each.name, each.tokens, row) for each in scores.per_document or () for row in each.windows)
    return {(name, tokens): row for name, tokens, row in rows if row.window == window}


def _passkey(base: results.PasskeyScores, run: results.PasskeyScores) -> Iterator[Row]:
    if base.target != run.target:
        return
    outcomes = {depth.k: depth.outcomes or [] for depth in base.depths if base.seed == run.seed}
    pairs = [
        pair for depth in run.depths for pair in zip(outcomes.get(depth.k, []), depth.outcomes or [], strict=False)
    ]
    if pairs:
        before, after = zip(*pairs, strict=True)
        yield _points(f"passkeys in {run.target:,}", fmean(before), fmean(after), *of_pairs(before, after), len(pairs))
    yield _row(f"k_max of {run.target:,}", base.k_max, run.k_max, run.k_max - base.k_max, None, "tokens")


def _benchmarks(base: results.BenchmarkScores, run: results.BenchmarkScores) -> Iterator[Row]:
    for task, after in run.tasks.items():
        before = base.tasks.get(task)
        if before is None or before.acc is None or after.acc is None:
            continue
        if before.outcomes and after.outcomes and len(before.outcomes) == len(after.outcomes):
            found = of_pairs([each == 1 for each in before.outcomes], [each == 1 for each in after.outcomes])
            yield _points(task, before.acc, after.acc, *found, len(after.outcomes))
        else:
            yield _points(task, before.acc, after.acc, *unpaired(before.acc, after.acc, before.stderr, after.stderr))


def _ruler(base: results.RulerScores, run: results.RulerScores, original: int | None) -> Iterator[Row]:
    """By window: the mean of the tasks that both were measured on, each of the same weight."""
    windows = {each.window: each.tasks for each in base.lengths}
    for each in run.lengths:
        its = windows.get(each.window, {})
        names = [name for name in each.tasks if name in its]
        if not names:
            continue
        tasks = [(its[name], each.tasks[name]) for name in names]
        before, after = (mean_of(each.window, dict(zip(names, of, strict=True))) for of in zip(*tasks, strict=True))
        what = f"RULER at {each.window:,}{_place(each.window, original)}, {len(names)} tasks"
        if base.seed == run.seed and all(b.length == a.length and b.outcomes and a.outcomes for b, a in tasks):
            differences = [[y - x for x, y in zip(b.outcomes or (), a.outcomes or (), strict=False)] for b, a in tasks]
            errors = [standard_error(each) for each in differences]
            change, interval = after.score - before.score, None
            if None not in errors:
                reach = quantile(min(map(len, differences))) * math.hypot(*filter(None, errors)) / len(names)
                interval = (change - reach, change + reach)
            yield _points(what, before.score, after.score, change, interval, sum(map(len, differences)))
        else:
            known = (before.stderr or None, after.stderr or None)  # 0 where all outcomes are the same: not known
            yield _points(what, before.score, after.score, *unpaired(before.score, after.score, *known))
    lengths = {f"effective length, {PAPERS_THRESHOLD:.1%}": (base.effective_length, run.effective_length)}
    if (own := relative_to(base, base).relative) and (its_own := relative_to(base, run).relative):
        of_base = f"effective length, {SHARE_OF_BASE:.0%} of the base"
        lengths[of_base] = (own.effective_length, its_own.effective_length)
    for what, (was, reached) in lengths.items():
        yield _row(what, was, reached, reached - was, None, "tokens")


def _points(
    what: str, before: float, after: float, change: float, interval: Interval | None, pairs: int | None = None
) -> Row:
    in_percent = interval and (100 * interval[0], 100 * interval[1])
    return _row(f"{what}, %", 100 * before, 100 * after, 100 * change, in_percent, "points", pairs)


def _row(
    what: str, base: float, run: float, change: float, interval: Interval | None, unit: Unit, pairs: int | None = None
) -> Row:
    words = verdict(change, interval, unit, lower_is_better=unit == "%")
    return Row(
        measurement=what, base=base, run=run, unit=unit, change=change, interval=interval, pairs=pairs, verdict=words
    )


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio)


def _place(window: int, original: int | None) -> str:
    return "" if original is None else " (old window)" if window <= original else " (beyond)"
