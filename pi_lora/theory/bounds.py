"""The attention score as a function of distance, and how large it can be between and beyond the trained distances.

Section 2 and appendix A of the paper. Distances `s` are in tokens, angles in radians; scores are plain products of a
query and a key, before the division by sqrt(d) that attention makes. `d` is how many numbers of a head rotate, `c` the
base of the frequencies (configs: `rope_theta`). Arrays are float64: under float32 an angle of 100,000 radians is off by
0.004.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pi_lora.errors import ScalingError
from pi_lora.scaling.config import Config, full_attention_rope, method_of, scale_of, window_of

Reals: TypeAlias = NDArray[np.float64]
Complexes: TypeAlias = NDArray[np.complex128]


def frequencies(head_dim: int, theta: float) -> Reals:
    """The `d / 2` rotation speeds `theta_j = c^(-2j / d)`, radians a token (Eqn. 1).

    >>> frequencies(4, 100.0).tolist()
    [1.0, 0.1]
    """
    return np.asarray(theta ** (-2.0 * np.arange(head_dim // 2) / head_dim), dtype=np.float64)


def coefficients(query: ArrayLike, key: ArrayLike) -> Complexes:
    """The `h_j = (q_2j + i q_2j+1) (k_2j - i k_2j+1)` of queries and keys before rotation (Eqn. 3).

    Shapes: [..., d] and [..., d], in the paper's order, the two numbers of a pair side by side; returns [..., d / 2].

    >>> coefficients([1.0, 2.0], [3.0, 4.0]).tolist()
    [(11+2j)]
    """
    q, k = (np.asarray(each, dtype=np.float64) for each in (query, key))
    return np.asarray((q[..., ::2] + 1j * q[..., 1::2]) * (k[..., ::2] - 1j * k[..., 1::2]), dtype=np.complex128)


def attention_score(h: ArrayLike, s: ArrayLike, theta: float) -> Reals:
    """The score `a(s) = Re sum_j h_j e^(i s theta_j)` at the distances `s` (Eqn. 3).

    Shapes: `h` [..., d / 2] and `s` [n]; returns [..., n].

    >>> attention_score([1.0, 1.0], [0.0, np.pi], theta=100.0).round(4).tolist()  # 1 + 1, then cos(pi) + cos(pi / 10)
    [2.0, -0.0489]
    """
    found = np.asarray(h, dtype=np.complex128)
    angles = np.outer(frequencies(2 * found.shape[-1], theta), np.asarray(s, dtype=np.float64))
    return found.real @ np.cos(angles) - found.imag @ np.sin(angles)


def linear_score(h: ArrayLike, s: ArrayLike, theta: float) -> Reals:
    """The chord `a_linear(s)` between the scores at the whole distances on either side of `s` (Eqn. 6).

    Shapes as `attention_score`. At whole distances it is the score itself.

    >>> round(float(linear_score([1.0, 1.0], [0.5], theta=100.0)[0]), 4)  # (2 + cos(1) + cos(0.1)) / 2
    1.7677
    """
    at = np.asarray(s, dtype=np.float64)
    below = np.floor(at)
    return (1 - (at - below)) * attention_score(h, below, theta) + (at - below) * attention_score(h, below + 1, theta)


def papers_interpolation_bound(head_dim: int, theta: float, largest: ArrayLike, s: ArrayLike) -> Reals:
    """The paper's bound on `|a - a_linear|`: `d max|h| (s - s1) (s2 - s) / (8 ln c)` (Eqn. 5), between whole distances.

    `largest` is `max_j |h_j|`. In the middle it is `d max|h| / (32 ln c)`, in the paper's setting `d max|h| / 294.73`
    (Eqn. 7). Its proof turns an inequality round (see `curvature`), and the true difference can be larger, as it is for
    `worst_case` and for real queries and keys; `interpolation_bound` is the one that holds.

    >>> round(float(128 / papers_interpolation_bound(128, 1e4, 1.0, 0.5)), 2)
    294.73
    """
    return np.asarray(head_dim * np.asarray(largest) * _between(s) / (8 * np.log(theta)), dtype=np.float64)


def interpolation_bound(head_dim: int, theta: float, largest: ArrayLike, s: ArrayLike) -> Reals:
    """What `|a - a_linear|` cannot exceed: `max|h| sum_j theta_j^2 (s - s1) (s2 - s) / 2`; arguments as the paper's.

    The paper's proof as far as it is sound: `|a''| <= max|h| sum_j theta_j^2`. In the middle, in the paper's setting,
    `d max|h| / 256.11`, which is 15 % above Eqn. 7.

    >>> round(float(128 / interpolation_bound(128, 1e4, 1.0, 0.5)), 2)
    256.11
    """
    return np.asarray(np.asarray(largest) * curvature(head_dim, theta) * _between(s) / 2, dtype=np.float64)


def curvature(head_dim: int, theta: float) -> float:
    """The most that `|a''|` can be where `max|h|` is 1: `sum_j theta_j^2 = (1 - c^-2) / (1 - c^(-4/d))`.

    The paper's appendix goes on with `1 / (1 - c^(-4/d)) <= d / (4 ln c)`, from `c^x <= 1 + x ln c`. But an exponential
    lies above its tangent: `c^x >= 1 + x ln c`, so `d / (4 ln c)` is the smaller one, and no bound.

    >>> round(curvature(128, 1e4), 3), round(float(128 / (4 * np.log(1e4))), 3)
    (3.998, 3.474)
    """
    return float((frequencies(head_dim, theta) ** 2).sum())


def worst_case(head_dim: int, theta: float) -> Complexes:
    """Coefficients of size 1 whose score bends most between the distances 0 and 1, its peak being half-way.

    The difference from the chord there is `sum_j (1 - cos(theta_j / 2))`, above the paper's bound in its own setting:

    >>> h = worst_case(128, 1e4)
    >>> difference = attention_score(h, [0.5], 1e4) - linear_score(h, [0.5], 1e4)
    >>> bounds = papers_interpolation_bound(128, 1e4, 1.0, 0.5), interpolation_bound(128, 1e4, 1.0, 0.5)
    >>> [round(float(each), 4) for each in (difference[0], *bounds)]
    [0.4939, 0.4343, 0.4998]
    """
    return np.asarray(np.exp(-0.5j * frequencies(head_dim, theta)), dtype=np.complex128)


def partial_sums(head_dim: int, theta: float, s: ArrayLike) -> Reals:
    """`B(s) = sum_(k=1)^(d/2) |A_k(s)|` with `A_k(s) = sum_(j<k) e^(i s theta_j)`,
    which Eqn. 8 multiplies; shape as `s`.

    At distance 0 every `A_k` is `k`:

    >>> float(partial_sums(128, 1e4, 0.0)), sum(range(1, 65))
    (2080.0, 2080)
    """
    at = np.asarray(s, dtype=np.float64)
    partial, total = np.zeros(at.shape, dtype=np.complex128), np.zeros(at.shape)
    for frequency in frequencies(head_dim, theta):
        partial = partial + np.exp(1j * at * frequency)
        total = total + np.abs(partial)
    return total


def extrapolation_bound(head_dim: int, theta: float, largest: ArrayLike, s: ArrayLike) -> Reals:
    """What `|a(s)|` cannot exceed at any distance: `2 max|h| B(s)` (Eqn. 8).

    Summation by parts: `a = Re sum_k (h_k-1 - h_k) A_k` with `h_(d/2) = 0`, and each difference is at most `2 max|h|`.

    >>> float(extrapolation_bound(4, 100.0, largest=3.0, s=0.0))  # B(0) = 1 + 2
    18.0
    """
    return np.asarray(2 * np.asarray(largest) * partial_sums(head_dim, theta, s), dtype=np.float64)


def _between(s: ArrayLike) -> Reals:
    """`(s - s1) (s2 - s)` for the whole distances around `s`; at most 1/4."""
    share = np.asarray(s, dtype=np.float64) % 1.0
    return np.asarray(share * (1 - share), dtype=np.float64)


@dataclass(frozen=True)
class Setting:
    """`head_dim` rotating numbers of a head (d), the base `theta` (c), and the windows L and L' in tokens.

    The defaults are LLaMA-7B's, and L' as in the paper's figures.
    """

    head_dim: int = 128
    theta: float = 10_000.0
    original: int = 2048
    target: int = 4096

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ScalingError(f"--head-dim: {self.head_dim}: numbers rotate in pairs; give an even number from 2 on")
        if not self.theta > 1:
            raise ScalingError(f"--theta: {self.theta:g}: is no base of rotary frequencies; give one above 1")
        if self.original < 2:
            raise ScalingError(f"--original: {self.original}: is no window; give 2 tokens or more")
        if self.target <= self.original:
            raise ScalingError(
                f"--target: {self.target} is not longer than the window of {self.original}; give a longer one"
            )


def setting_of(config: Config, original: int | None = None, target: int | None = None) -> Setting:
    """The setting of a model: a stretched one has L' already, for others it is twice L unless given.

    Raises:
        ScalingError: the model has no rotary embeddings, or its frequencies are not `c^(-2j / d)`, all of them over one
            scale, for which the bounds hold.
    """
    rope = full_attention_rope(config)
    if rope.get("rope_type", "default") not in ("default", "linear"):
        raise ScalingError(
            f"rope_type {rope['rope_type']}: its frequencies are not those of the bounds; "
            "give a model with default or linear ropes"
        )
    stretched = method_of(config) == "pi"
    own = original or round(window_of(config) / scale_of(config))
    return Setting(
        rotating(config), float(rope["rope_theta"]), own, target or (window_of(config) if stretched else 2 * own)
    )


def rotating(config: Config) -> int:
    """How many numbers of a head rotate: all of them, or the share that the config names.

    >>> rotating({"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    8
    """
    rope = full_attention_rope(config)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share: float = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return int(head_dim * share)


@dataclass(frozen=True)
class Bounds:
    """What the bounds come to, per unit of `max_j |h_j|`, over the distances 0, 1, ... L'.

    `papers_divisor` is what `d max|h|` is divided by in Eqn. 7, `divisor` in the bound that holds; `factor` is twice
    each, the paper's "about 600", which supposes `B(s) = d`; `ratio` is how far the bounds are apart at the distance
    where they are closest. `lowest` is the smallest `B(s) / d`, at `lowest_at` tokens.
    """

    papers_divisor: float
    divisor: float
    papers_factor: float
    factor: float
    papers_ratio: float
    ratio: float
    lowest: float
    lowest_at: int


def bounds_of(setting: Setting) -> Bounds:
    """The numbers of section 2.3 for any setting.

    >>> found = bounds_of(Setting())
    >>> round(found.papers_divisor, 2), round(found.papers_factor, 1), round(found.factor, 1), round(found.lowest, 3)
    (294.73, 589.5, 512.2, 1.116)
    """
    d, c = setting.head_dim, setting.theta
    papers, proven = (float(bound(d, c, 1.0, 0.5)) for bound in (papers_interpolation_bound, interpolation_bound))
    sums = partial_sums(d, c, np.arange(setting.target + 1))
    lowest_at = int(sums.argmin())
    beyond = float(extrapolation_bound(d, c, 1.0, lowest_at))
    return Bounds(
        papers_divisor=d / papers,
        divisor=d / proven,
        papers_factor=2 * d / papers,
        factor=2 * d / proven,
        papers_ratio=beyond / papers,
        ratio=beyond / proven,
        lowest=float(sums[lowest_at]) / d,
        lowest_at=lowest_at,
    )
