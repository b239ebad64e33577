"""The rotary frequencies of a scaled model, and the factor of cosines and sines, from the config alone, as the papers
define them. No torch is needed.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from pi_lora.scaling.config import Config, full_attention_rope, rotary_frequencies_of

Rope = Config
Frequencies = Sequence[float]


def scaled_frequencies_of(config: Config) -> list[float]:
    """Return the rotary frequencies of the layers with full attention in radians a token, in inputs of the whole
    window; the one that is highest without scaling first.

    >>> scaled_frequencies_of({"head_dim": 4, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}})
    [0.25, 0.0025]
    """
    rope = full_attention_rope(config)
    frequencies = rotary_frequencies_of(config)
    divisors = DIVISORS[rope["rope_type"]](rope, frequencies)
    return [frequency / divisor for frequency, divisor in zip(frequencies, divisors, strict=True)]


def attention_factor_of(config: Config) -> float:
    """Return the factor of cosines and sines: as stated, or the default of YaRN (Peng et al. 2023, Eqn. 22) with the
    `mscale` of DeepSeek, or that of LongRoPE (Ding et al. 2024).
    """
    rope = full_attention_rope(config)
    kind = rope["rope_type"]
    stated = rope.get("attention_factor")
    if kind not in ("yarn", "longrope") or stated is not None:
        return float(stated or 1)
    original = rope.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
    factor = float(rope.get("factor") or config["max_position_embeddings"] / original)
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    growth = 0.1 * math.log(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return float((growth * rope["mscale"] + 1) / (growth * rope["mscale_all_dim"] + 1))
    return growth + 1


def _none(rope: Rope, frequencies: Frequencies) -> list[float]:
    return [1.0] * len(frequencies)


def _equal(rope: Rope, frequencies: Frequencies) -> list[float]:
    """The paper's PI (Eqn. 4)."""
    return [float(rope.get("factor") or 1)] * len(frequencies)


def _listed(rope: Rope, frequencies: Frequencies) -> list[float]:
    return list(rope["long_factor"])


def _yarn(rope: Rope, frequencies: Frequencies) -> list[float]:
    """Peng et al. 2023, section 3.2: a frequency that turns `beta_fast` times in the original window is kept, one that
    turns `beta_slow` times is divided by the factor, and a ramp by the index leads from one to the other.
    """
    rotated = 2 * len(frequencies)

    def index_of(turns: float) -> float:
        wavelength = rope["original_max_position_embeddings"] / turns
        return rotated * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    first = index_of(rope.get("beta_fast") or 32)
    last = index_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, rotated - 1)
    if first == last:
        last += 0.001
    shares = [(index - first) / (last - first) for index in range(len(frequencies))]
    return [_between(rope["factor"], min(max(share, 0.0), 1.0)) for share in shares]


def _llama3(rope: Rope, frequencies: Frequencies) -> list[float]:
    """Dubey et al. 2024, as published with Llama 3.1: a ramp by the turns in the original window."""
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    turns = [rope["original_max_position_embeddings"] * frequency / (2 * math.pi) for frequency in frequencies]
    return [_between(rope["factor"], min(max((high - turn) / (high - low), 0.0), 1.0)) for turn in turns]


def _between(factor: float, share: float) -> float:
    """Return the divisor of a frequency that is a mean of two: divided by the factor (`share`), and unscaled."""
    return 1 / (share / factor + 1 - share)


# `dynamic` scales longer inputs than a config declares, by their length.
DIVISORS: Mapping[str, Callable[[Rope, Frequencies], list[float]]] = {
    "default": _none,
    "dynamic": _none,
    "linear": _equal,
    "proportional": _equal,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _listed,
}
