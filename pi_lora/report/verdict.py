"""The verdict on an extension in three lines: how far the model reads, what it finds, and what short inputs lost."""

from collections.abc import Iterator

from pi_lora.evaluation.changes import change_of
from pi_lora.evaluation.measurement import Metric
from pi_lora.report.scores import MeasuredRun, shown_metrics
from pi_lora.run import BASE

PASSKEYS = "passkeys retrieved"
# Measurements of short inputs.
SHORT = ("benchmarks", "chat")


def verdict_lines(run: MeasuredRun) -> Iterator[str]:
    """Yield the verdict on a run, of what was measured. The base counts where it was measured in the same way."""
    original = run.metadata.original
    costs = []
    for name in ("perplexity", "passkey", *SHORT):
        if name not in run.scores:
            continue
        alike, _ = run.side_by_side(name)
        *_, last = alike.values()
        before = list(shown_metrics(alike[BASE]).values()) if BASE in alike else []
        after = list(shown_metrics(last).values())
        if name == "perplexity":
            yield _reads(before, after, original)
        if name == "passkey":
            yield _finds(before, after)
        known = {metric.heading: metric for metric in before}
        for metric in after:
            is_short = name in SHORT or (name == "perplexity" and metric.at == original)
            if is_short and metric.heading in known:
                costs.append(f"{metric.heading}: {change_of(known[metric.heading], metric).verdict}")
    if costs:
        yield f"**Short inputs**, beside the base: {'; '.join(costs)}."
    elif run.scores:
        yield "**Short inputs**: the base was not measured in the same way."


def _reads(before: list[Metric], after: list[Metric], original: int | None) -> str:
    """Return how well the model reads the longest window, beside the base in the original one."""
    farthest = max(after, key=lambda metric: metric.at or 0)
    line = f"**Reads** {farthest.at:,} tokens with a perplexity of {farthest.text}"
    for metric in before:
        if metric.at == original and farthest.compares_with(metric):
            verdict = change_of(metric, farthest).verdict
            return f"{line}; the base in its own {original:,} tokens has {metric.text}: {verdict}."
    return f"{line}."


def _finds(before: list[Metric], after: list[Metric]) -> str:
    """Return how many passkeys the model finds in the longest context, beside the base."""
    found = [metric for metric in after if metric.label == PASSKEYS] or after
    farthest = max(found, key=lambda metric: metric.at or 0)
    line = f"**Finds** {_count(farthest)} in {farthest.at:,} tokens"
    for metric in before:
        if metric.heading == farthest.heading:
            return f"{line}; the base {_count(metric)}."
    return f"{line}."


def _count(metric: Metric) -> str:
    """Return a share of passkeys as a count with the interval in percent; another metric as it is."""
    if metric.label != PASSKEYS or not metric.interval:
        return f"passkeys up to {metric.text}"
    low, high = metric.interval
    successes = round(sum(value.value for value in metric.values))
    return f"{successes} of {len(metric.values)} passkeys ({low:.0f} to {high:.0f} %)"
