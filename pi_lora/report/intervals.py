"""95 % intervals of differences between two models that were measured on the same documents, trials or examples."""

import math
from collections.abc import Sequence

# Student's t for 95 % by degrees of freedom, from 1.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
NORMAL_95 = 1.96
Interval = tuple[float, float]
# Differences and their weights.
Group = tuple[Sequence[float], Sequence[float]]


def quantile(pairs: int) -> float:
    """Return how many standard errors a 95 % interval of the mean of `pairs` differences reaches to each side.

    >>> [round(quantile(pairs), 2) for pairs in (2, 3, 11, 24, 1000)]
    [12.71, 4.3, 2.23, 2.1, 2.0]
    """
    freedom = pairs - 1
    return T_95[freedom - 1] if freedom <= len(T_95) else 2 + 2.3 / freedom


def of_means(groups: Sequence[Group]) -> tuple[float, Interval | None]:
    """Return the mean over groups of the weighted mean of the differences in each, with its 95 % interval, of ratio
    estimators that are independent of each other; None if a group has fewer than two differences.

    >>> of_means([([0.1, 0.1], [1, 3])])
    (0.1, (0.1, 0.1))
    """
    means, errors = [], []
    for differences, weights in groups:
        total, number = sum(weights), len(differences)
        means.append(sum(weight * each for weight, each in zip(weights, differences, strict=True)) / total)
        if number > 1:
            squares = sum((w * (each - means[-1])) ** 2 for w, each in zip(weights, differences, strict=True))
            errors.append(math.sqrt(squares * number / (number - 1)) / total)
    mean = sum(means) / len(groups)
    if len(errors) < len(groups):
        return mean, None
    fewest = min(len(differences) for differences, _ in groups)
    reach = quantile(fewest) * math.hypot(*errors) / len(groups)
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
