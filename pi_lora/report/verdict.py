"""The verdict on an extension in four lines: how far the model reads, what it finds, what the tuning added to the
scaling, and what short inputs lost.
"""

from collections.abc import Iterable, Mapping

from pi_lora.evaluation.changes import Row, change_of, changes_between
from pi_lora.evaluation.measurement import Metric, Scores
from pi_lora.report.scores import comparable_metrics, shown_metrics

PASSKEYS = "passkeys retrieved"
# Measurements of retrieval, and those whose inputs are short.
RETRIEVAL = ("passkey", "ruler")
SHORT = ("benchmarks", "chat")
GAIN = "better"


def verdict_of(
    base: Mapping[str, Scores], untuned: Mapping[str, Scores], run: Mapping[str, Scores], original: int | None
) -> dict[str, str]:
    """Return in words how far a run reads, what it finds, what the tuning added, and what became of short inputs.

    Args:
        base: The scores of the base by measurement. Those with other options than the run's do not count.
        untuned: The scores of the base under the scaling of the run, without tuning, likewise.
        run: The scores of the run by measurement. What was not measured, or only on texts that the run is tuned on, has
            no line, except for short inputs.
        original: The original window (L) in tokens.
    """
    lines = {}
    finds = []
    tuning: list[Row] = []
    costs: list[Row] = []
    is_measured = False
    for name, scores in run.items():
        if scores.tuned_on:
            continue
        before = comparable_metrics(base.get(name), scores)
        # The last scores of a run may be those of step 0.
        without_tuning = {} if scores is untuned.get(name) else comparable_metrics(untuned.get(name), scores)
        after = list(shown_metrics(scores).values())
        if scores.measurement == "perplexity":
            lines["Reads"] = _reads(before, after, original)
            tuning += changes_between(without_tuning, [_farthest(after)])
            in_original = [metric for metric in after if metric.at == original]
            costs = [*changes_between(before, in_original), *costs]
            is_measured |= bool(in_original)
        if scores.measurement in RETRIEVAL:
            found = _farthest([metric for metric in after if metric.label in (PASSKEYS, "RULER")] or after)
            finds.append(_finds(before, found))
            tuning += changes_between(without_tuning, [found])
        if scores.measurement in SHORT:
            costs += changes_between(before, after)
            is_measured = True
    if finds:
        lines["Finds"] = "; ".join(finds)
    if tuning:
        lines["Compared with no tuning"] = _list(tuning)
    if costs:
        lines["Short inputs"] = _list(costs)
        if any(GAIN in row.verdict for row in costs):
            lines["Short inputs"] += "; tuning alone, without a longer window, may gain as much"
    elif run:
        lines["Short inputs"] = "the base was not measured in the same way" if is_measured else "not measured"
    return lines


def _reads(before: Mapping[str, Metric], after: list[Metric], original: int | None) -> str:
    """Return how well the run reads the longest window, and the base the original one.

    No gain is claimed over the base: tuning on such text, without a longer window, lowers the perplexity too.
    """
    farthest = _farthest(after)
    line = f"{farthest.at:,} tokens with a perplexity of {farthest.text}"
    for metric in before.values():
        if metric.at == original and farthest.compares_with(metric):
            line += f"; the base reads {original:,} tokens with {metric.text}"
            change = change_of(metric, farthest)
            if GAIN not in change.verdict:
                line += f": {change.text}"
    return line


def _finds(before: Mapping[str, Metric], farthest: Metric) -> str:
    """Return what the run finds in the longest context, and what the base finds there."""
    line = f"{_retrieved(farthest)} in {farthest.at:,} tokens"
    if farthest.heading in before:
        line += f", the base {_retrieved(before[farthest.heading])}"
    return line


def _farthest(metrics: list[Metric]) -> Metric:
    return max(metrics, key=lambda metric: metric.at or 0)


def _retrieved(metric: Metric) -> str:
    """Return a share of passkeys as a count with the interval in percent, and another metric as it is."""
    if metric.label != PASSKEYS:
        return f"{'RULER' if metric.label == 'RULER' else 'passkeys up to'} {metric.text}"
    successes = round(sum(value.value for value in metric.values))
    count = f"{successes} of {len(metric.values)} passkeys"
    if metric.interval is None:
        return count
    low, high = metric.interval
    return f"{count} ({low:.0f} to {high:.0f} %)"


def _list(rows: Iterable[Row]) -> str:
    """Return changes in words, each with the name of the metric."""
    return "; ".join(f"{row.measurement}: {row.text}" for row in rows)
