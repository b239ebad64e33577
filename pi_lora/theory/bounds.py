"""The attention score as a function of distance, and how large it can be between and beyond the trained distances.

Section 2 and appendix A of the paper. Distances `s` are in tokens, angles in radians; scores are plain products of a
query and a key, before attention divides them by sqrt(d). `d` is how many numbers of a head rotate, `c` the base of the
frequencies (configs: `rope_theta`). Arrays are float64: in float32 an angle of 100,000 radians is off by 0.004.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pi_lora.errors import ScalingError

Reals: TypeAlias = NDArray[np.float64]
Complexes: TypeAlias = NDArray[np.complex128]


def frequencies(head_dim: int, theta: float) -> Reals:
    """Return the `d / 2` frequencies `theta_j = c^(-2j / d)` in radians per token (Eqn. 1).

    >>> frequencies(4, 100.0).tolist()
    [1.0, 0.1]
    """
    return theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)


def attention_score(h: ArrayLike, s: ArrayLike, theta: float) -> Reals:
    """Return `a(s) = Re sum_j h_j e^(i s theta_j)` at the distances `s` (Eqn. 3).

    Shapes: `h` [..., d / 2] and `s` [n] to [..., n].

    >>> attention_score([1.0, 1.0], [0.0, np.pi], theta=100.0).round(4).tolist()  # 1 + 1, then cos(pi) + cos(pi / 10)
    [2.0, -0.0489]
    """
    h = np.asarray(h)
    head_dim = 2 * h.shape[-1]
    angles = np.outer(frequencies(head_dim, theta), np.asarray(s))
    return (h @ np.exp(1j * angles)).real


def interpolation_bound(head_dim: int, theta: float, s: float, papers: bool = False) -> float:
    """Return the proven bound on `|a - a_linear|` for `max_j |h_j|` of 1, or the paper's bound.

    `a_linear` is the chord between the scores at the whole distances `s1` and `s2` around `s` (Eqn. 6). The proven
    bound is `sum_j theta_j^2 (s - s1) (s2 - s) / 2`. The paper's is `d (s - s1) (s2 - s) / (8 ln c)` (Eqn. 5; Eqn. 7 in
    the middle). It is 13 % lower, and scores exceed it: see `curvature`.

    >>> round(128 / interpolation_bound(128, 1e4, 0.5), 2)
    256.11
    >>> round(128 / interpolation_bound(128, 1e4, 0.5, papers=True), 2)
    294.73
    """
    share = s % 1.0
    largest_curvature = curvature(head_dim, theta)
    if papers:
        largest_curvature = head_dim / (4 * math.log(theta))
    return largest_curvature * share * (1 - share) / 2


def curvature(head_dim: int, theta: float) -> float:
    """Return the largest `|a''|` for `max|h|` of 1: `sum_j theta_j^2 = (1 - c^-2) / (1 - c^(-4/d))`.

    The paper's appendix continues with `1 / (1 - c^(-4/d)) <= d / (4 ln c)`. But an exponential lies above its tangent,
    `c^x >= 1 + x ln c`, so `d / (4 ln c)` is the smaller number and no bound.

    >>> round(curvature(128, 1e4), 3), round(float(128 / (4 * np.log(1e4))), 3)
    (3.998, 3.474)
    """
    return float((frequencies(head_dim, theta) ** 2).sum())


def partial_sums(head_dim: int, theta: float, s: ArrayLike) -> Reals:
    """Return `B(s) = sum_(k=1)^(d/2) |A_k(s)|`, `A_k(s) = sum_(j<k) e^(i s theta_j)` (Eqn. 8); shape as `s`.

    The bound on `|a(s)|` at any distance is `2 max|h| B(s)`. Summation by parts: `a = Re sum_k (h_k-1 - h_k) A_k` with
    `h_(d/2) = 0`, and each difference is at most `2 max|h|`.

    >>> float(partial_sums(128, 1e4, 0.0)), sum(range(1, 65))  # at distance 0 every A_k is k
    (2080.0, 2080)
    """
    turns = 1j * np.asarray(s)
    waves = (np.exp(turns * frequency) for frequency in frequencies(head_dim, theta))
    return np.asarray(sum(map(np.abs, accumulate(waves))))


@dataclass(frozen=True)
class Setting:
    """`head_dim` (d), `theta` (c), and the windows L and L' in tokens."""

    head_dim: int
    theta: float
    original: int
    target: int

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ScalingError(f"--head-dim: {self.head_dim}: rotary dimensions are in pairs; give an even number")
        if self.theta <= 1:
            raise ScalingError(f"--theta: {self.theta:g}: frequencies fall only with a base above 1; give more")
        if self.target <= self.original:
            raise ScalingError(f"--target: {self.target} is not longer than the window of {self.original}; give more")


@dataclass(frozen=True)
class Bounds:
    """The bounds in numbers, for `max_j |h_j|` of 1 and the distances 0, 1, ... L'.

    The interpolation bound in the middle between distances is `d max|h|` divided by `divisor`, according to the paper
    by `papers_divisor` (Eqn. 7).
    """

    papers_divisor: float
    divisor: float
    lowest: float  # the smallest `B(s) / d`; twice this times a divisor is the ratio of the bounds there
    lowest_at: int  # the distance of `lowest` in tokens


def bounds_of(setting: Setting) -> Bounds:
    """Return the numbers of section 2.3 for any setting.

    >>> bounds = bounds_of(Setting(head_dim=128, theta=10_000.0, original=2048, target=4096))  # LLaMA-7B's
    >>> round(bounds.papers_divisor, 2), round(bounds.divisor, 2), round(bounds.lowest, 3)
    (294.73, 256.11, 1.116)
    """
    d = setting.head_dim
    c = setting.theta
    sums = partial_sums(d, c, np.arange(setting.target + 1)) / d
    return Bounds(
        papers_divisor=d / interpolation_bound(d, c, 0.5, papers=True),
        divisor=d / interpolation_bound(d, c, 0.5),
        lowest=float(sums.min()),
        lowest_at=int(sums.argmin()),
    )


def fit_noise(head_dim: int, theta: float, original: int, seed: int = 0) -> tuple[Reals, Complexes]:
    """Fit a score to standard normal noise at every distance inside the window, as in figure 2 (appendix C.1).

    Return the points [L] at the distances 0, 1, ... L - 1, and the coefficients `h` [d / 2]. The fit uses singular
    values. The basis is nearly dependent (condition 1e16), so rounding decides how large the fit is beyond the window.
    """
    points = np.random.default_rng(seed).standard_normal(original)
    angles = np.outer(np.arange(original), frequencies(head_dim, theta))
    waves = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    solution = np.linalg.lstsq(waves, points)[0]
    cosines, sines = np.split(solution, 2)
    return points, cosines - 1j * sines
