"""The setting that bounds are computed for, given by flags or read off a model's config; and what they come to."""

from dataclasses import dataclass

import numpy as np

from pi_lora.errors import ScalingError
from pi_lora.rope import Config, full_attention_rope, method_of, scale_of, window_of
from pi_lora.theory.bounds import (
    extrapolation_bound,
    interpolation_bound,
    papers_interpolation_bound,
    partial_sums,
)


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
