"""The extension of a model config to a longer window, or why it is refused. No torch is needed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pi_lora.errors import ScalingError
from pi_lora.scaling.config import (
    LOCAL_ROPE_ONLY,
    LONGROPE_ONLY,
    ORIGINAL_WINDOW,
    VLLM_ATTENTION_KEYS,
    Config,
    Method,
    constant_longrope,
    fixed_longrope,
    full_attention_rope,
    local_window,
    rotary_dimensions,
    rotary_frequencies_of,
    scale_of,
    window_factor,
    window_of,
    with_full_rope,
    with_legacy_rope_keys,
)

# The scalings of each rope type. The frequencies of an extended model are extended further: a `linear` or `yarn` factor
# is multiplied. `yarn` allows no larger theta, because vLLM would read the old window.
METHODS_OF: Mapping[str, tuple[Method, ...]] = {
    "default": get_args(Method),
    "linear": ("pi", "theta", "direct"),
    "yarn": ("yarn",),
    "llama3": ("llama3", "theta", "direct"),
    "longrope": ("pi",),
    "proportional": ("pi", "theta", "direct"),
}
# The wavelengths that `llama3` keeps and divides, in parts of the original window, as in Llama 3.1.
LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


# What is possible with a model that no scaling extends.
WITHIN_WINDOW = "tune it by scaling: keep within its window"


@dataclass(frozen=True)
class Extension:
    """The extension of an unextended base to `target` tokens. `original` is the window L, by default read from the
    config. `theta` is the new base of the frequencies for the scaling `theta`, by default NTK-aware. `factors`,
    `attention_factor` and `searched` are those of the scaling `factors`: a divisor of each frequency, a factor of
    cosines and sines, and the windows L and L' that the divisors were searched for.
    """

    target: int
    original: int | None = None
    scaling: Method = "pi"
    theta: float | None = None
    factors: tuple[float, ...] | None = None
    attention_factor: float = 1.0
    searched: tuple[int, int] | None = None

    def original_of(self, config: Config) -> int:
        """Return the original window L of the model in tokens."""
        return self.original or window_of(config)

    def scale_of(self, config: Config) -> float:
        """Return L'/L, the `factor` of configs."""
        return self.target / self.original_of(config)


def extend_config(config: Config, extension: Extension) -> dict[str, Any]:
    """Return a copy of a model config with a window of `extension.target` tokens, in both dialects.

    Ropes per layer type change on full-attention layers only. `direct` changes the declared window only.
    `max_position_embeddings` is the number from which every reader computes L':

    - L' divided by the factor under `linear`, `dynamic` and `proportional`: engines multiply it, and `dynamic` scales
      inputs longer than it;
    - L' of Gemma 3 under `linear`, where vLLM does not multiply;
    - L' under `yarn`: transformers 4 computes the factor from it, and SGLang takes it as the window;
    - L' under every other rope.
    """
    check_extendable(config, extension)
    rope = _extended_rope(config, extension)
    divisor = 1.0
    if rope["rope_type"] != "yarn":
        divisor = window_factor(config, rope)
    declared = round(extension.target / divisor)
    if extension.scaling in ("theta", "direct") and declared * divisor < extension.target:
        declared += 1
    extended = {**with_full_rope(config, rope), "max_position_embeddings": declared}
    extended.pop(ORIGINAL_WINDOW, None)
    if extended.get("head_dim", 0) is None:
        # transformers (5.23) computes the frequencies of yarn with the entry as it is, as in Mixtral's config.
        extended["head_dim"], _ = rotary_dimensions(config, rope)
    is_constant = constant_longrope(rope) is not None
    has_lists = rope["rope_type"] == "longrope" and not is_constant
    if has_lists or extension.scaling in ("theta", "factors"):
        extended[ORIGINAL_WINDOW] = extension.original_of(config)
    if is_constant or extension.scaling == "factors":
        extended["original_max_position_embeddings"] = declared
    return with_legacy_rope_keys(extended)


def check_extendable(config: Config, extension: Extension) -> None:
    """Raise ScalingError if the target window is not longer, the model's rope cannot be extended by this scaling, or no
    rotary layer attends to the target window.
    """
    model_type = config.get("model_type")
    method = extension.scaling
    original = extension.original_of(config)
    target = extension.target
    suitable = methods_for(config)
    problem = None
    if target <= original:
        problem = f"context.target: {target} is not longer than the model's own window of {original}; nothing to extend"
    elif model_type in LOCAL_ROPE_ONLY:
        why = "only its local-attention layers are rotary; nothing to interpolate"
        problem = f"model of type {model_type}: {why}; {WITHIN_WINDOW}"
    elif method not in get_args(Method):
        problem = f"scaling: {method}: no such scaling; choose from {', '.join(suitable)}"
    elif method not in suitable:
        kind = full_attention_rope(config)["rope_type"]
        advice = f"{WITHIN_WINDOW} of {window_of(config)} tokens, or start from an unextended base"
        if suitable:
            advice = f"use {' or '.join(suitable)}"
        problem = f"scaling: {method}: not possible for a {model_type} model with rope type {kind}; {advice}"
    elif _is_beyond_layers(config, target):
        limit = f"every layer of this model attends to at most {local_window(config)} tokens"
        problem = f"context.target: {target}: {limit}; choose a model with full attention"
    elif extension.original and original != window_of(config) and scale_of(config) != 1:
        own = f"this base is scaled already, and has a window of {window_of(config)} tokens"
        problem = f"context.original: {extension.original}: {own}; leave it out"
    elif method == "factors" or extension.factors:
        problem = _factors_problem(config, extension)
    if problem:
        raise ScalingError(problem)


def check_reach(name: str, config: Config, target: int) -> None:
    """Raise ScalingError if a model reads fewer than `target` tokens as it is (`scaling: keep`)."""
    window = window_of(config)
    if target > window:
        advice = "extend it first, or lower the target" if methods_for(config) else "lower the target"
        raise ScalingError(
            f"context.target: {target} is longer than the window of {name}, {window} tokens, "
            f"which scaling: keep does not change; {advice}"
        )
    if _is_beyond_layers(config, target):
        limit = f"every layer of {name} attends to at most {local_window(config)} tokens"
        raise ScalingError(
            f"context.target: {target}: {limit}; lower the target, or choose a model with full attention"
        )


def _is_beyond_layers(config: Config, target: int) -> bool:
    reach = local_window(config)
    return reach is not None and reach < target


def _factors_problem(config: Config, extension: Extension) -> str | None:
    """Return why the divisors do not suit a model; None if they do."""
    factors = extension.factors
    if extension.scaling != "factors":
        return f"--factors: have no effect under scaling: {extension.scaling}; use factors, or leave them out"
    if factors is None:
        return "context.factors: scaling: factors needs them; name a file that pi-lora search wrote"
    frequencies = len(rotary_frequencies_of(config))
    if len(factors) != frequencies:
        return f"context.factors: {len(factors)} numbers; the model has {frequencies} rotary frequencies"
    windows = (extension.original_of(config), extension.target)
    if extension.searched and extension.searched != windows:
        searched = "{:,} to {:,} tokens".format(*extension.searched)
        asked = "{:,} to {:,}".format(*windows)
        return f"context.factors: were searched for {searched}, not {asked}; search again for this model and target"
    if extension.attention_factor != 1 and config.get("model_type") in LONGROPE_ONLY:
        return f"context.factors: attention_factor: transformers 4 drops it for {config['model_type']}; leave it out"
    return None


def methods_for(config: Config) -> tuple[Method, ...]:
    """Return the scalings that can extend a model, by its rope type."""
    rope = full_attention_rope(config)
    kind = rope["rope_type"]
    if kind == "default" and config.get("model_type") in LONGROPE_ONLY:
        return (*METHODS_OF["linear"], "factors")
    if config.get(ORIGINAL_WINDOW) and fixed_longrope(rope):
        return ()
    if constant_longrope(rope) is not None:
        # A larger theta would be taken for another base.
        return ("pi", "direct")
    return METHODS_OF.get(kind, ())


def ntk_theta(config: Config, scale: float) -> float:
    """Return the base of the frequencies with which the lowest one is divided by `scale` (NTK-aware scaling).

    Frequency i of n is `theta^(-2i/D)`, so theta grows by `scale^(D/(2n-2))`. D is the number of rotary dimensions of a
    head, but under `proportional` all dimensions of a head.

    >>> round(ntk_theta({"head_dim": 64, "rope_theta": 1e5}, 2))
    204522
    """
    rope = full_attention_rope(config)
    head, rotated = rotary_dimensions(config, rope)
    if rotated <= 2:
        raise ScalingError("scaling: theta: a head has one rotary frequency, which theta does not change; use pi")
    denominator = head if rope["rope_type"] == "proportional" else rotated
    last_index = 2 * ((rotated + 1) // 2 - 1)
    growth: float = scale ** (denominator / last_index)
    return float(rope["rope_theta"]) * growth


def _extended_rope(config: Config, extension: Extension) -> dict[str, Any]:
    """Return the rope of the full-attention layers after the extension."""
    rope = full_attention_rope(config)
    scale = extension.scale_of(config)
    method = extension.scaling
    if method == "direct":
        return rope
    if method == "theta":
        theta = extension.theta or ntk_theta(config, scale)
        theta_before = rope["rope_theta"]
        if theta <= theta_before:
            raise ScalingError(f"context.theta: {theta:g} is not larger than the model's own {theta_before:g}")
        return {**rope, "rope_theta": theta}
    if method == "dynamic":
        return {
            **rope,
            "rope_type": "dynamic",
            "factor": scale,
        }
    if method == "factors":
        return _divided(rope, extension)
    if method in ("yarn", "llama3"):
        return _extended_bands(rope, method, scale, extension.original_of(config))
    return _interpolated(config, rope, scale, extension.target)


def _extended_bands(rope: dict[str, Any], method: Method, scale: float, original: int) -> dict[str, Any]:
    """Return a `yarn` or `llama3` rope, of a model with a default rope or one that was extended by the same method."""
    if rope["rope_type"] != method:
        rope = {
            **rope,
            "rope_type": method,
            "factor": 1.0,
            "original_max_position_embeddings": original,
        }
        if method == "llama3":
            rope |= LLAMA3_BANDS
    factor_before = rope["factor"]
    rope["factor"] = factor_before * scale
    return _without_default_attention(rope, factor_before)


def _interpolated(config: Config, rope: dict[str, Any], scale: float, target: int) -> dict[str, Any]:
    """Return a rope whose frequencies are divided by `scale` (`pi`)."""
    constant = constant_longrope(rope)
    if rope["rope_type"] == "longrope" and constant is None:
        rope["long_factor"] = [factor * scale for factor in rope["long_factor"]]
        if rope.get("factor"):
            rope["factor"] *= scale
        return rope
    factor_before = constant or float(rope.get("factor") or 1)
    factor = factor_before * scale
    if config.get("model_type") in LONGROPE_ONLY:
        divisors = (factor,) * len(rotary_frequencies_of(config))
        return _longrope(rope, divisors, target)
    rope_type = "proportional" if rope["rope_type"] == "proportional" else "linear"
    return {
        **rope,
        "rope_type": rope_type,
        "factor": factor,
    }


def _without_default_attention(rope: dict[str, Any], factor_before: float) -> dict[str, Any]:
    """Drop an `attention_factor` that is YaRN's default for the old factor. Readers compute the new default."""
    stated = rope.get("attention_factor")
    default = 0.1 * math.log(factor_before) + 1
    if stated is not None and math.isclose(stated, default, rel_tol=1e-3):
        del rope["attention_factor"]
    return rope


def _divided(rope: Config, extension: Extension) -> dict[str, Any]:
    """Return a `longrope` of the divisors of `factors`; raise ScalingError if they change nothing."""
    divisors = extension.factors or ()
    if set(divisors) == {1.0}:
        raise ScalingError("scaling: factors: divides no frequency of this model; choose another scaling")
    return _longrope(
        rope,
        divisors,
        target=extension.target,
        attention_factor=extension.attention_factor,
    )


def _longrope(rope: Config, divisors: tuple[float, ...], target: int, attention_factor: float = 1.0) -> dict[str, Any]:
    """Return a `longrope` that divides the frequencies of short and of long inputs alike."""
    longrope = {
        **rope,
        "rope_type": "longrope",
        "short_factor": list(divisors),
        "long_factor": list(divisors),
        # Readers that know no `attention_factor` derive 1 from the two windows.
        "original_max_position_embeddings": target,
        "factor": 1.0,
        "attention_factor": attention_factor,
    }
    if attention_factor != 1:
        longrope |= dict.fromkeys(VLLM_ATTENTION_KEYS, attention_factor)
    return longrope
