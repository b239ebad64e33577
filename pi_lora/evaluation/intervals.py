"""95 % intervals: of shares, and of the change between two models that were measured on the same documents, trials or
examples.
"""

import math
from collections.abc import Sequence

Interval = tuple[float, float]
# What was measured of both models, and the weight.
Pairs = list[tuple[float, float, float]]
# Standard errors to each side of a 95 % interval.
NORMAL_95 = 1.96
# Student's t for 95 % by degrees of freedom, from 1.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


def wilson(mean: float, samples: int) -> Interval:
    """Return the interval of a share (Wilson 1927), which has a width also where all samples agree.

    >>> [round(bound, 3) for bound in wilson(1.0, 5)], [round(bound, 3) for bound in wilson(0.5, 100)]
    ([0.566, 1.0], [0.404, 0.596])
    """
    squared = NORMAL_95**2
    center = (mean + squared / (2 * samples)) / (1 + squared / samples)
    reach = NORMAL_95 * math.sqrt(mean * (1 - mean) / samples + squared / (4 * samples**2)) / (1 + squared / samples)
    return max(0.0, center - reach), min(1.0, center + reach)


def quantile(pairs: int) -> float:
    """Return how many standard errors an interval of the mean of `pairs` differences reaches to each side.

    >>> [round(quantile(pairs), 2) for pairs in (2, 3, 11, 24, 1000)]
    [12.71, 4.3, 2.23, 2.1, 2.0]
    """
    freedom = pairs - 1
    return T_95[freedom - 1] if freedom <= len(T_95) else 2 + 2.3 / freedom


def pairs_needed(change: float, reach: float, pairs: int, most: int) -> int:
    """Return how many pairs give the mean difference `change` an interval without 0, if they scatter as these `pairs`
    do, whose interval reaches as far as `reach` to each side; at most `most`.

    >>> pairs_needed(-0.5, 1.2, 2, 100), pairs_needed(0.01, 1.2, 2, 100)
    (3, 100)
    """
    spread = reach / quantile(pairs) * math.sqrt(pairs)
    enough = (n for n in range(pairs + 1, most) if quantile(n) * spread < abs(change) * math.sqrt(n))
    return next(enough, most)


def of_means(groups: Sequence[Pairs]) -> Interval | None:
    """Return the interval of the mean over independent groups of the weighted mean difference in each (a ratio
    estimator); None if a group has a single pair, or if all differences are the same, which tells nothing of others.

    >>> [round(bound, 2) for bound in of_means([[(1.0, 1.5, 1), (1.0, 1.5, 1), (2.0, 3.5, 2)]])]
    [-0.61, 2.61]
    """
    means, errors = [], []
    for pairs in groups:
        total, number = sum(weight for _, _, weight in pairs), len(pairs)
        if number < 2:
            return None
        mean = sum(weight * (after - before) for before, after, weight in pairs) / total
        squares = sum((weight * (after - before - mean)) ** 2 for before, after, weight in pairs)
        means.append(mean)
        errors.append(math.sqrt(squares * number / (number - 1)) / total)
    mean, reach = math.fsum(means) / len(groups), quantile(min(map(len, groups))) * math.hypot(*errors) / len(groups)
    return (mean - reach, mean + reach) if reach > 1e-9 else None


def of_successes(pairs: Pairs) -> Interval:
    """Return the interval of how much more often something succeeds (1) instead of failing (0), of Bonett and Price
    (2012), which has a width also where all pairs agree.

    >>> [round(bound, 2) for bound in of_successes([(0, 1, 1)] * 8)]
    [0.43, 1]
    """
    number = len(pairs) + 2
    more = (sum(before < after for before, after, _ in pairs) + 1) / number
    less = (sum(before > after for before, after, _ in pairs) + 1) / number
    reach = NORMAL_95 * math.sqrt((more + less - (more - less) ** 2) / number)
    return max(-1, more - less - reach), min(1, more - less + reach)
