"""From the tasks of RULER to means with standard errors, and to the effective length of a model."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from pi_lora.evaluation.metrics import longest_passing
from pi_lora.evaluation.ruler.scores import (
    PAPERS_THRESHOLD,
    SHARE_OF_BASE,
    RelativeLength,
    RulerScores,
    RulerTask,
    RulerWindow,
)


def standard_error(outcomes: Sequence[float]) -> float | None:
    """Return that of the mean; None of a single one.

    >>> standard_error([0.0, 1.0]), standard_error([1.0])
    (0.5, None)
    """
    return stdev(outcomes) / math.sqrt(len(outcomes)) if len(outcomes) > 1 else None


def mean_of(window: int, tasks: Mapping[str, RulerTask]) -> RulerWindow:
    """Return the mean of tasks at `window` tokens, each of the same weight."""
    errors = [task.stderr for task in tasks.values() if task.stderr is not None]
    error = math.hypot(*errors) / len(tasks) if len(errors) == len(tasks) else None
    return RulerWindow(window=window, score=fmean(t.score for t in tasks.values()), stderr=error, tasks=dict(tasks))


def effective_length(lengths: Sequence[RulerWindow], threshold: float = PAPERS_THRESHOLD) -> int:
    """Return the longest window such that it and all shorter ones reach the threshold; 0 if the shortest does not."""
    return longest_passing({each.window: each.score for each in lengths}, threshold)


def relative_to(base: RulerScores, scores: RulerScores) -> RulerScores:
    """Return `scores` with the effective length by 95 % of the mean that `base` has at the longest measured window of
    its own; as they are if it has none there, or was measured on other tasks.
    """
    own = (base.window or 0) / base.scale
    inside = [each for each in base.lengths if each.window <= own]
    if not inside or {frozenset(each.tasks) for each in (*scores.lengths, *inside)} != {frozenset(inside[0].tasks)}:
        return scores
    best = max(inside, key=lambda each: each.window)
    if best.score == 0:  # 95 % of which every model reaches
        return scores
    found = effective_length(scores.lengths, SHARE_OF_BASE * best.score)
    relative = RelativeLength(base=base.model, window=best.window, score=best.score, effective_length=found)
    return RulerScores.model_validate(scores.model_dump(exclude_unset=True) | {"relative": relative})


def side_by_side(found: Sequence[RulerScores]) -> list[RulerScores]:
    """Return scores of several models, each relative to the base: the one with the shortest window."""
    base = min(found, key=lambda scores: scores.window or 0)
    return [relative_to(base, scores) for scores in found]
