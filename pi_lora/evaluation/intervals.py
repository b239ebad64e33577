"""95 % intervals of shares, and of the change between two models measured on the same documents, trials or examples."""

import math
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]
# The values of both models, before and after, and the weight.
Pairs = list[tuple[float, float, float]]
# Half the width of a 95 % interval in standard errors.
NORMAL_95 = 1.96
# Student's t for 95 % by degrees of freedom, from 1.
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


def wilson(mean: float, samples: int) -> Interval:
    """Return the interval of a share (Wilson 1927), which has a width also if all samples agree.

    >>> [round(bound, 3) for bound in wilson(1.0, 5)], [round(bound, 3) for bound in wilson(0.5, 100)]
    ([0.566, 1.0], [0.404, 0.596])
    """
    squared = NORMAL_95**2
    denominator = 1 + squared / samples
    center = (mean + squared / (2 * samples)) / denominator
    variance = mean * (1 - mean) / samples + squared / (4 * samples**2)
    half_width = NORMAL_95 * math.sqrt(variance) / denominator
    # In floats the bounds of 0 and 1 miss them by a rounding error at some numbers of samples, such as 48.
    return max(0.0, min(mean, center - half_width)), min(1.0, max(mean, center + half_width))


def quantile(pairs: int) -> float:
    """Return half the width, in standard errors, of an interval of the mean of `pairs` differences.

    >>> [round(quantile(pairs), 2) for pairs in (2, 3, 11, 24, 1000)]
    [12.71, 4.3, 2.23, 2.1, 2.0]
    """
    degrees_of_freedom = pairs - 1
    if degrees_of_freedom <= len(T_95):
        return T_95[degrees_of_freedom - 1]
    return 2 + 2.3 / degrees_of_freedom


def pairs_needed(change: float, half_width: float, pairs: int, most: int) -> int:
    """Return the number of pairs, at most `most`, that give the mean difference `change` an interval without 0. The
    interval of the present `pairs` has a half width of `half_width`; more pairs are expected to scatter as much.

    >>> pairs_needed(-0.5, 1.2, 2, 100), pairs_needed(0.01, 1.2, 2, 100)
    (3, 100)
    """
    deviation = half_width / quantile(pairs) * math.sqrt(pairs)
    for number in range(pairs + 1, most):
        if quantile(number) * deviation < abs(change) * math.sqrt(number):
            return number
    return most


def of_means(groups: Sequence[Pairs]) -> Interval | None:
    """Return the interval of the mean over independent groups of the weighted mean difference (a ratio estimator). None
    if a group has a single pair, or if all differences are equal and so give no estimate of the scatter.

    >>> [round(bound, 2) for bound in of_means([[(1.0, 1.5, 1), (1.0, 1.5, 1), (2.0, 3.5, 2)]])]
    [-0.61, 2.61]
    """
    means = []
    standard_errors = []
    for pairs in groups:
        number = len(pairs)
        if number < 2:
            return None
        before, after, weights = np.array(pairs).T
        mean = np.average(after - before, weights=weights)
        # The sum of these is 0.
        residuals = weights * (after - before - mean)
        means.append(mean)
        standard_errors.append(math.sqrt(number) * residuals.std(ddof=1) / weights.sum())
    mean = math.fsum(means) / len(groups)
    fewest = min(map(len, groups))
    half_width = quantile(fewest) * math.hypot(*standard_errors) / len(groups)
    if half_width <= 1e-9:
        return None
    return mean - half_width, mean + half_width


def of_successes(pairs: Pairs) -> Interval:
    """Return the interval of the change in the share of successes (1) against failures (0), after Bonett and Price
    (2012). It has a width also if all pairs agree.

    >>> [round(bound, 2) for bound in of_successes([(0, 1, 1)] * 8)]
    [0.43, 1]
    """
    number = len(pairs) + 2
    gains = sum(before < after for before, after, _ in pairs)
    losses = sum(before > after for before, after, _ in pairs)
    gained = (gains + 1) / number
    lost = (losses + 1) / number
    change = gained - lost
    half_width = NORMAL_95 * math.sqrt((gained + lost - change**2) / number)
    return max(-1, change - half_width), min(1, change + half_width)
