"""Lists of divisors of the rotary frequencies, which a config holds as a `longrope`. No torch is needed.

Frequency i of R/2 is `theta^(-2i/R)` radians a token, the highest first. R is the number of rotary dimensions of a
head. A list divides frequency i by its number i.
"""

import math
from collections.abc import Sequence

# A frequency that is divided by this number turns by at most a thousandth of a radian in a million tokens.
DROPPED = 1e9
# CoPE clips the lowest 20 of the 64 frequencies of Llama 3 (github.com/hrlics/CoPE, modeling_cope.py).
CLIPPED_SHARE = 20 / 64


def clipped(frequencies: Sequence[float]) -> tuple[float, ...]:
    """Return the divisors of CoPE (Li et al. 2026, arXiv 2602.05258): the lowest frequencies are multiplied by half a
    period of a cosine, from 1 down to 0. The last one no longer turns.

    >>> [round(divisor, 2) for divisor in clipped([1.0] * 10)][-3:]
    [1.0, 2.0, 1000000000.0]
    """
    clipped_number = max(2, round(CLIPPED_SHARE * len(frequencies)))
    first = len(frequencies) - clipped_number
    divisors = [1.0] * len(frequencies)
    for index in range(first, len(frequencies)):
        angle = math.pi * (index - first) / (clipped_number - 1)
        kept = (1 + math.cos(angle)) / 2
        divisors[index] = DROPPED
        if kept * DROPPED > 1:
            divisors[index] = 1 / kept
    return tuple(divisors)


def dropped(frequencies: Sequence[float], original: int) -> tuple[float, ...]:
    """Return divisors that stop every frequency with a wavelength above the original window, in tokens: positions that
    never completed a turn in training. p-RoPE (Barbero et al. 2025, arXiv 2410.06205) has no such frequencies from the
    start; DroPE (arXiv 2512.12167) drops all.

    >>> dropped([1.0, 0.1, 0.01], original=100)
    (1.0, 1.0, 1000000000.0)
    """
    lowest = 2 * math.pi / original
    return tuple(1.0 if frequency >= lowest else DROPPED for frequency in frequencies)
