"""The scalings: how each divides the rotary frequencies, how configs state it, and how it extends a model.

A new scaling is a record of `SCALINGS`, and its name in `Method`. No torch is needed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from pi_lora.errors import ScalingError
from pi_lora.scaling.config import RopeConfig

Method = Literal["pi", "yarn", "theta", "llama3", "dynamic", "direct", "factors"]
Parameters = dict[str, Any]
# vLLM's names of the factor of the attention in a `longrope`.
VLLM_ATTENTION_KEYS = ("short_mscale", "long_mscale")
# The wavelengths that `llama3` keeps and divides, in parts of the original window, as in Llama 3.1.
LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


class RopeType(NamedTuple):
    """The meaning of a `rope_type` in configs.

    Attributes:
        divisors: Return the divisor of each frequency in inputs of the whole window.
        extended_by: The scalings that extend such a rope. The frequencies of an extended model are extended further: a
            `linear` or `yarn` factor is multiplied. `yarn` allows no larger theta: vLLM would read the old window.
        method: The scaling that it stands for.
        multiplies_window: Whether engines multiply the declared window by the factor.
        states_original: Whether the parameters hold the original window.
        only_long_inputs: Whether it scales inputs alone that are longer than those of the training.
        attention_factor: Return the default factor of cosines and sines, from parameters, factor and original window.
        in_gguf: Whether GGUF files hold the name of the type, or the list of divisors.
    """

    divisors: Callable[[RopeConfig], list[float]]
    extended_by: tuple[Method, ...] = ()
    method: Method | None = None
    multiplies_window: bool = False
    states_original: bool = False
    only_long_inputs: bool = False
    attention_factor: Callable[[Parameters, float, float], float] | None = None
    in_gguf: Literal["name", "divisors"] | None = None


@dataclass(frozen=True)
class ExtensionOptions:
    """The options of an extension: the fields of `pi_lora.scaling.extension.Extension`, which describes them."""

    target: int
    original: int | None = None
    scaling: Method = "pi"
    theta: float | None = None
    factors: tuple[float, ...] | None = None
    attention_factor: float = 1.0
    searched: tuple[int, int] | None = None


class Scaling(NamedTuple):
    """A scaling that extends a model.

    Attributes:
        parameters: Return the parameters of a rope after an extension with a known original window, by a scale.
        summary: What the model card says, with the numbers `scale` and `theta`.
        rope_types: The types of ropes in configs that it writes.
        is_recorded: Whether the parameters tell the extension.
    """

    parameters: Callable[[RopeConfig, ExtensionOptions, float], Parameters]
    summary: str
    rope_types: Mapping[str, RopeType] = {}
    is_recorded: bool = True


def _none(rope: RopeConfig) -> list[float]:
    return [1.0] * len(rope.frequencies)


def _equal(rope: RopeConfig) -> list[float]:
    """The paper's PI (Eqn. 4)."""
    return [rope.factor] * len(rope.frequencies)


def _listed(rope: RopeConfig) -> list[float]:
    return list(rope.parameters["long_factor"])


def _yarn(rope: RopeConfig) -> list[float]:
    """Peng et al. 2023, section 3.2: a frequency that turns `beta_fast` times in the original window is kept, one that
    turns `beta_slow` times is divided by the factor, and a ramp by the index leads from one to the other.
    """
    parameters = rope.parameters
    rotated = 2 * len(rope.frequencies)

    def index_of(turns: float) -> float:
        wavelength = parameters["original_max_position_embeddings"] / turns
        return rotated * math.log(wavelength / (2 * math.pi)) / (2 * math.log(parameters["rope_theta"]))

    first = index_of(parameters.get("beta_fast") or 32)
    last = index_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, rotated - 1)
    if first == last:
        last += 0.001
    shares = [(index - first) / (last - first) for index in range(len(rope.frequencies))]
    return [_between(rope.factor, share) for share in shares]


def _llama3(rope: RopeConfig) -> list[float]:
    """Dubey et al. 2024, as published with Llama 3.1: a ramp by the turns in the original window."""
    low = rope.parameters["low_freq_factor"]
    high = rope.parameters["high_freq_factor"]
    original = rope.parameters["original_max_position_embeddings"]
    turns = [original * frequency / (2 * math.pi) for frequency in rope.frequencies]
    ramp = (high - low) or 1e-9  # Llama 4 Scout has none
    return [_between(rope.factor, (high - turn) / ramp) for turn in turns]


def _between(factor: float, share: float) -> float:
    """Return the divisor of a frequency that is a mean of two: divided by the factor (`share`), and unscaled."""
    share = min(max(share, 0.0), 1.0)
    return 1 / (share / factor + 1 - share)


def _attention_of_yarn(parameters: Parameters, factor: float, original: float) -> float:
    """Peng et al. 2023, Eqn. 22, with the `mscale` of DeepSeek."""
    growth = 0.1 * math.log(factor)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return float((growth * parameters["mscale"] + 1) / (growth * parameters["mscale_all_dim"] + 1))
    return growth + 1


def _attention_of_longrope(parameters: Parameters, factor: float, original: float) -> float:
    """Ding et al. 2024."""
    return math.sqrt(1 + math.log(factor) / math.log(original))


def ntk_theta(rope: RopeConfig, scale: float) -> float:
    """Return the base of the frequencies with which the lowest one is divided by `scale` (NTK-aware scaling).

    Frequency i of n is `theta^(-2i/D)`, so theta grows by `scale^(D/(2n-2))`. D is the number of rotary dimensions of a
    head, but under `proportional` all dimensions of a head.

    >>> round(ntk_theta(RopeConfig({"head_dim": 64, "rope_theta": 1e5}), 2))
    204522
    """
    head, rotated = rope.dimensions
    if rotated <= 2:
        raise ScalingError("scaling: theta: a head has one rotary frequency, which theta does not change; use pi")
    denominator = head if rope.rope_type == "proportional" else rotated
    last_index = 2 * ((rotated + 1) // 2 - 1)
    growth: float = scale ** (denominator / last_index)
    return float(rope.parameters["rope_theta"]) * growth


def _direct(rope: RopeConfig, options: ExtensionOptions, scale: float) -> Parameters:
    """The paper's FT: the frequencies stay."""
    return rope.parameters


def _pi(rope: RopeConfig, options: ExtensionOptions, scale: float) -> Parameters:
    """All frequencies are divided by the scale (paper.tex, Eqn. 4)."""
    if rope.rope_type == "longrope" and rope.constant_divisor is None:
        long_factor = [factor * scale for factor in rope.parameters["long_factor"]]
        changed: Parameters = {**rope.parameters, "long_factor": long_factor}
        if changed.get("factor"):
            changed["factor"] *= scale
        return changed
    factor = rope.factor * scale
    if rope.facts.accepts_longrope_only:
        return _longrope(rope, options, (factor,) * len(rope.frequencies))
    rope_type = "proportional" if rope.rope_type == "proportional" else "linear"
    return {**rope.parameters, "rope_type": rope_type, "factor": factor}


def _theta(rope: RopeConfig, options: ExtensionOptions, scale: float) -> Parameters:
    """A larger base, by default that of NTK-aware scaling (bloc97 2023); Code Llama chose one (Roziere et al. 2023)."""
    theta = options.theta or ntk_theta(rope, scale)
    theta_before = rope.parameters["rope_theta"]
    if theta <= theta_before:
        raise ScalingError(f"context.theta: {theta:g} is not larger than the model's own {theta_before:g}")
    return {**rope.parameters, "rope_theta": theta}


def _dynamic(rope: RopeConfig, options: ExtensionOptions, scale: float) -> Parameters:
    """NTK-aware scaling of inputs beyond L by their own length (Peng et al. 2023, appendix B.3)."""
    return {**rope.parameters, "rope_type": "dynamic", "factor": scale}


def _banded(method: Method, rope: RopeConfig, options: ExtensionOptions, scale: float) -> Parameters:
    """High frequencies stay and low ones are divided: `yarn` (Peng et al. 2023) and `llama3` (Dubey et al. 2024), of a
    default rope or one that was extended by the same method.
    """
    changed = dict(rope.parameters)
    if rope.rope_type != method:
        changed |= {
            "rope_type": method,
            "factor": 1.0,
            "original_max_position_embeddings": options.original,
        }
        if method == "llama3":
            changed |= LLAMA3_BANDS
    factor_before = changed["factor"]
    changed["factor"] = factor_before * scale
    stated = changed.get("attention_factor")
    default = 0.1 * math.log(factor_before) + 1
    if stated is not None and math.isclose(stated, default, rel_tol=1e-3):
        # It is YaRN's default for the old factor. Readers compute the new default.
        del changed["attention_factor"]
    return changed


def _factors(rope: RopeConfig, options: ExtensionOptions, scale: float) -> Parameters:
    """A divisor of its own for each frequency (LongRoPE2, Shang et al. 2025)."""
    divisors = options.factors or ()
    if set(divisors) == {1.0}:
        raise ScalingError("scaling: factors: divides no frequency of this model; choose another scaling")
    return _longrope(rope, options, divisors)


def _longrope(rope: RopeConfig, options: ExtensionOptions, divisors: tuple[float, ...]) -> Parameters:
    """Return a `longrope` that divides the frequencies of short and of long inputs alike."""
    attention_factor = options.attention_factor
    longrope = {
        **rope.parameters,
        "rope_type": "longrope",
        "short_factor": list(divisors),
        "long_factor": list(divisors),
        # Readers that know no `attention_factor` derive 1 from the two windows.
        "original_max_position_embeddings": options.target,
        "factor": 1.0,
        "attention_factor": attention_factor,
    }
    if attention_factor != 1:
        longrope |= dict.fromkeys(VLLM_ATTENTION_KEYS, attention_factor)
    return longrope


FURTHER_BY_PI: tuple[Method, ...] = ("pi", "theta", "direct")
SCALINGS: Mapping[Method, Scaling] = {
    "pi": Scaling(
        _pi,
        "positions are divided by {scale:g}",
        {
            "linear": RopeType(_equal, FURTHER_BY_PI, "pi", multiplies_window=True, in_gguf="name"),
            "proportional": RopeType(_equal, FURTHER_BY_PI, "pi", multiplies_window=True),
        },
    ),
    "yarn": Scaling(
        partial(_banded, "yarn"),
        "low rotary frequencies are divided (yarn), factor {scale:g}",
        {
            "yarn": RopeType(
                _yarn,
                ("yarn",),
                "yarn",
                multiplies_window=True,
                states_original=True,
                attention_factor=_attention_of_yarn,
                in_gguf="name",
            )
        },
    ),
    "theta": Scaling(_theta, "the base of the rotary frequencies is {theta:g}", is_recorded=False),
    "llama3": Scaling(
        partial(_banded, "llama3"),
        "low rotary frequencies are divided (llama3), factor {scale:g}",
        {
            "llama3": RopeType(
                _llama3, ("llama3", "theta", "direct"), "llama3", states_original=True, in_gguf="divisors"
            )
        },
    ),
    "dynamic": Scaling(
        _dynamic,
        "rotary frequencies change for long inputs (dynamic NTK, factor {scale:g})",
        {"dynamic": RopeType(_none, get_args(Method), "dynamic", multiplies_window=True, only_long_inputs=True)},
    ),
    "direct": Scaling(_direct, "positions are not rescaled"),
    "factors": Scaling(
        _factors,
        "every rotary frequency is divided by a number of its own (`longrope` in `config.json`)",
        {"longrope": RopeType(_listed, ("pi",), attention_factor=_attention_of_longrope, in_gguf="divisors")},
        is_recorded=False,
    ),
}
ROPE_TYPES = {"default": RopeType(_none, get_args(Method))}
for _scaling in SCALINGS.values():
    ROPE_TYPES.update(_scaling.rope_types)
