"""Scalings of rotary frequencies in model configs, read, extended or refused: numbers and dictionaries, no torch.

A model trained on positions `[0, L)` reads `L' > L` tokens when position `m` is replaced by `m L / L'`
(paper.tex, Eqn. 4), or when its rotary frequencies change in another way. Configs call `L' / L` the `factor`.

- `pi`: every frequency divided by the factor (rope type `linear`; in a `longrope` its long factors, multiplied);
- `yarn` (Peng et al. 2023) and `llama3` (Dubey et al. 2024): low frequencies divided, high ones kept;
- `theta`: a larger base of the frequencies (NTK-aware; bloc97 2023, Roziere et al. 2023);
- `dynamic`: NTK by the length of the input, for comparison;
- `direct`: nothing changes (the paper's FT).

Configs come in two dialects: transformers 5 nests everything in `rope_parameters`; transformers 4, vLLM and SGLang read
top-level `rope_theta` and `rope_scaling`.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pi_lora.errors import ScalingError

Config = Mapping[str, Any]
Method = Literal["pi", "yarn", "theta", "llama3", "dynamic", "direct"]

# The scalings of each rope type. A model that was extended before goes on from its own frequencies: its `linear` or
# `yarn` factor is multiplied. A larger theta would leave the window that vLLM reads of `yarn` as it is.
METHODS_OF: Mapping[str, tuple[Method, ...]] = {
    "default": get_args(Method),
    "linear": ("pi", "theta", "direct"),
    "yarn": ("yarn",),
    "llama3": ("llama3", "theta", "direct"),
    "longrope": ("pi",),
    "proportional": ("pi", "theta", "direct"),
}
# The wavelengths that `llama3` keeps and divides, in parts of the original window, as Llama 3.1 has them.
LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# The key of configs extended by `theta`, or by `pi` under a `longrope`, which no rope records: the window before, in
# tokens.
ORIGINAL_WINDOW = "original_context_window"

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
# With ropes per layer type, for which transformers 4 has one `rope_scaling` that applies to full-attention layers.
LAYERED_IN_4 = {"gemma3_text", "gemma3n_text", "olmo3"}
# Their configs in transformers 4 reject a `rope_scaling` with fields other than `type` and `factor`.
TWO_FIELDS_IN_4 = {"olmo", "olmo2"}
# Whose names for theta and the rotary share of a head are others in transformers 4 (and the `rope_scaling` path of 5).
GPT_NEOX = {"gpt_neox", "gpt_neox_japanese"}
GPT_NEOX_IN_4 = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
# Whose `max_position_embeddings` under `linear` is the extended window itself, in published configs and in vLLM.
WINDOW_DECLARED = {"gemma3_text", "gemma3n_text"}
LOCAL_ATTENTION = {SLIDING_ATTENTION, "chunked_attention"}
MULTIPLIES_WINDOW = {"linear", "dynamic", "yarn", "proportional"}
# Their configs accept only `longrope`, which divides each frequency by its own number; the same one for all is PI.
LONGROPE_ONLY = {"phi3", "phi4_multimodal"}
# Only their sliding layers are rotary; layers with full attention have no positions. No config says so.
LOCAL_ROPE_ONLY = set("afmoe cohere2 cohere2_moe exaone4 exaone_moe flint kolibri1 llama4_text".split())


@dataclass(frozen=True)
class Extension:
    """How a plain base is extended to `target` tokens: the paper's `pi`, no rescaling (`direct`), or other scalings.
    `original` is its window L, by default the one in its config; `theta` a base of the frequencies for the scaling
    `theta`, by default NTK-aware.
    """

    target: int
    original: int | None = None
    scaling: Method = "pi"
    theta: float | None = None

    def original_of(self, config: Config) -> int:
        """Return the window L of the model that is extended, in tokens."""
        return self.original or window_of(config)

    def scale_of(self, config: Config) -> float:
        """Return L'/L, the `factor` of configs."""
        return self.target / self.original_of(config)


def read_rope(config: Config) -> dict[str, Any]:
    """Return the complete `rope_parameters` of a config in either dialect, per layer type where it has several."""
    if config.get("alibi"):
        raise _refused(config, "has ALiBi, no rotary position embeddings; nothing to interpolate")
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and nested:
        return deepcopy(dict(nested))  # the config classes of transformers change what they are given in place
    if isinstance(config.get("text_config"), Mapping):
        raise _refused(config, "is made of several models; give its language model alone")
    if config.get("rope_theta") is None:
        raise _refused(config, "has no rotary position embeddings that its config describes; nothing to interpolate")
    scaling = dict(config.get("rope_scaling") or {})
    rope_type = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    full = {**scaling, "rope_type": rope_type, "rope_theta": config["rope_theta"]}
    if config.get("rope_local_base_freq") is None:
        return full
    sliding = {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]}
    return {FULL_ATTENTION: full, SLIDING_ATTENTION: sliding}


def _refused(config: Config, why: str) -> ScalingError:
    return ScalingError(f"model of type {config.get('model_type', 'unknown')}: {why}")


def full_attention_rope(config: Config) -> dict[str, Any]:
    """Return the rope parameters of the layers that attend to the whole window."""
    rope = read_rope(config)
    if "rope_theta" in rope:
        return rope
    if not isinstance(rope.get(FULL_ATTENTION), Mapping):
        named = ", ".join(sorted(name for name, each in rope.items() if each))
        raise _refused(config, f"has ropes for {named}, none for {FULL_ATTENTION}; give a model that has one")
    return dict(rope[FULL_ATTENTION])


def with_full_rope(config: Config, rope: Config) -> dict[str, Any]:
    """Return a copy of a config with `rope` for the layers that attend to the whole window."""
    nested = read_rope(config)
    return {**config, "rope_parameters": {**nested, FULL_ATTENTION: rope} if FULL_ATTENTION in nested else rope}


def constant_longrope(rope: Config) -> float | None:
    """Return what a `longrope` written by `extend_config` divides every frequency by; None for any other rope."""
    factors = {*rope.get("short_factor", []), *rope.get("long_factor", [])}
    return float(factors.pop()) if rope.get("rope_type") == "longrope" and len(factors) == 1 else None


def method_of(config: Config) -> Method | None:
    """Return how a model was extended according to its config; None for an unextended one, `direct`, and a `longrope`
    with factors from a search.

    >>> method_of({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}})
    'pi'
    """
    rope = full_attention_rope(config)
    if config.get(ORIGINAL_WINDOW):
        return "pi" if rope.get("rope_type") == "longrope" else "theta"
    if constant_longrope(rope) is not None or (rope.get("rope_type") == "proportional" and "factor" in rope):
        return "pi"
    methods: dict[str, Method] = {"linear": "pi", "dynamic": "dynamic", "yarn": "yarn", "llama3": "llama3"}
    return methods.get(rope.get("rope_type", "default"))


def scale_of(config: Config) -> float:
    """Return the factor L'/L by which a model is extended, by any method; 1 if it is not, and for `direct`.

    >>> scale_of({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}})
    8.0
    """
    rope = full_attention_rope(config)
    if original := config.get(ORIGINAL_WINDOW):
        return window_of(config) / float(original)
    return constant_longrope(rope) or (float(rope["factor"]) if method_of(config) else 1.0)


def window_of(config: Config) -> int:
    """Return the context window of a model in tokens, by transformers' and vLLM's rule. A `linear`, `dynamic` or
    `proportional` rope multiplies `max_position_embeddings`, `yarn` its `original_max_position_embeddings`; with other
    types (`llama3`, `longrope`), and of Gemma 3 under `linear`, the window is as declared.

    >>> rope = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4}
    >>> window_of({"model_type": "gemma3_text", "max_position_embeddings": 131072, **rope})
    131072
    """
    if config.get("max_position_embeddings") is None:
        raise _refused(config, "its config has no max_position_embeddings, the context window; add it to config.json")
    rope, declared = full_attention_rope(config), int(config["max_position_embeddings"])
    # Some configs have the key without a number; yarn takes the other one then.
    multiplied: int = (rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings")) or declared
    return round(multiplied * _window_factor(config, rope))


def _window_factor(config: Config, rope: Config) -> float:
    """Return the factor by which engines multiply the window that a config with this rope declares."""
    if rope.get("rope_type") == "linear" and config.get("model_type") in WINDOW_DECLARED:
        return 1.0
    return float(rope.get("factor", 1)) if rope.get("rope_type") in MULTIPLIES_WINDOW else 1.0


def normalize_max_positions(config: Config, longest_input: float | None) -> Config:
    """Return a config whose `linear` rope multiplies `max_position_embeddings`, as transformers documents it. Some that
    were published (DeepSeek-Coder, Chinese-Alpaca-2-16k) declare the extended window there instead. No key tells them
    apart, but the `longest_input` of their tokenizer, in tokens, is the same number.
    """
    declared, rope = config.get("max_position_embeddings"), full_attention_rope(config)
    multiplies = rope.get("rope_type") == "linear" and config.get("model_type") not in WINDOW_DECLARED
    if not multiplies or declared is None or declared != longest_input:
        return config
    return {**config, "max_position_embeddings": round(declared / rope["factor"])}


def with_legacy_rope_keys(config: Config) -> dict[str, Any]:
    """Return a copy of a config whose scaling is read by transformers 5 and, at the top level, by 4, vLLM and SGLang.
    transformers 4 loads a config with `rope_parameters` alone silently unscaled. Models with ropes per layer type that
    only transformers 5 knows get no top level, which 5 would apply to the sliding layers too.
    """
    nested, rope, model_type = read_rope(config), full_attention_rope(config), str(config.get("model_type"))
    both = {**config, "rope_parameters": nested}
    if FULL_ATTENTION in nested and model_type not in LAYERED_IN_4:
        return {key: value for key, value in both.items() if key not in ("rope_theta", "rope_scaling")}
    names = GPT_NEOX_IN_4 if model_type in GPT_NEOX else {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            both[key] = both[names.get(key, key)] = rope[key]
    if sliding := nested.get(SLIDING_ATTENTION):
        both["rope_local_base_freq"] = sliding["rope_theta"]
    elsewhere = {"rope_theta", "partial_rotary_factor"} | ({"rope_type"} if model_type in TWO_FIELDS_IN_4 else set())
    keys = rope.keys() - elsewhere
    if rope.get("rope_type") == "linear" and model_type not in TWO_FIELDS_IN_4:
        keys |= {"rope_theta"}  # CTranslate2 looks for it here alone; transformers 4 warns that it does not need it
    if rope.get("rope_type") == "longrope":
        keys = {"short_factor", "long_factor"}  # which Phi-3's config in transformers 4 accepts, and no others
    kind = rope.get("rope_type", "default")
    both["rope_scaling"] = (
        None if kind == "default" else {"type": kind, **{key: rope[key] for key in rope if key in keys}}
    )
    return both


def extend_config(config: Config, extension: Extension) -> dict[str, Any]:
    """Return a copy of a model config with a window of `extension.target` tokens, in both dialects.

    Ropes per layer type change on full-attention layers only; `direct` declares the longer window alone.
    `max_position_embeddings` is the number from which every reader computes L':

    - L' divided by the factor under `linear`, `dynamic` and `proportional`: engines multiply it, and `dynamic` scales
      inputs longer than it; but L' of Gemma 3 under `linear`, where vLLM does not multiply;
    - L' under `yarn`: transformers 4 computes the factor from it, and SGLang takes it as the window;
    - L' under every other rope.
    """
    check_extendable(config, extension)
    rope = _extended_rope(config, extension)
    divisor = 1.0 if rope["rope_type"] == "yarn" else _window_factor(config, rope)
    declared = round(extension.target / divisor)
    extended = {**with_full_rope(config, rope), "max_position_embeddings": declared}
    extended.pop(ORIGINAL_WINDOW, None)
    if extension.scaling == "theta" or (rope["rope_type"] == "longrope" and constant_longrope(rope) is None):
        extended[ORIGINAL_WINDOW] = extension.original_of(config)
    if constant_longrope(rope) is not None:
        extended["original_max_position_embeddings"] = declared
    return with_legacy_rope_keys(extended)


def check_extendable(config: Config, extension: Extension) -> None:
    """Raise ScalingError if the target window is not longer, the model's rope cannot be extended by this scaling, or no
    layer has positions and attends to the target window.
    """
    model_type, method, original = config.get("model_type"), extension.scaling, extension.original_of(config)
    target, reach, suitable = extension.target, local_window(config), methods_for(config)
    problem = None
    if target <= original:
        problem = f"context.target: {target} is not longer than the model's own window of {original}; nothing to extend"
    elif model_type in LOCAL_ROPE_ONLY:
        problem = f"model of type {model_type}: only its local-attention layers are rotary; nothing to interpolate"
    elif method not in suitable:
        kind = full_attention_rope(config).get("rope_type", "default")
        advice = f"use {' or '.join(suitable)}" if suitable else "start from an unextended base"
        problem = f"scaling: {method}: not possible for a {model_type} model with rope type {kind}; {advice}"
    elif reach is not None and reach < target:
        limit = f"every layer of this model attends to at most {reach} tokens"
        problem = f"context.target: {target}: {limit}; choose a model with full attention"
    if problem:
        raise ScalingError(problem)


def methods_for(config: Config) -> tuple[Method, ...]:
    """Return the scalings that can extend a model, by its rope type."""
    rope = full_attention_rope(config)
    kind = rope.get("rope_type", "default")
    if constant_longrope(rope) is not None or (kind == "default" and config.get("model_type") in LONGROPE_ONLY):
        kind = "linear"
    return METHODS_OF.get(kind, ())


def check_reach(name: str, config: Config, target: int) -> None:
    """Raise ScalingError if a model's own window is shorter than `target` tokens (`scaling: keep`)."""
    if (window := window_of(config)) < target:
        raise ScalingError(
            f"context.target: {target} is longer than the window of {name}, {window} tokens, "
            "which scaling: keep does not change; extend it first, or lower the target"
        )


def local_window(config: Config) -> int | None:
    """Return the longest attention span of any layer in tokens, or None where a layer attends to the whole window.

    >>> local_window({"sliding_window": 4096}), local_window({"sliding_window": 4096, "use_sliding_window": False})
    (4096, None)
    """
    # transformers follows `layer_types` where a config has them, else `sliding_window` in every layer.
    kinds = set(config.get("layer_types") or [SLIDING_ATTENTION])
    if kinds - LOCAL_ATTENTION or config.get("use_sliding_window") is False:
        return None
    return max(config.get("sliding_window") or 0, config.get("attention_chunk_size") or 0) or None


def is_extension_of(run: Config, base: Config) -> bool:
    """Return whether `run` can be an extension of `base`: by any method of a plain rope, else of the same type."""
    before, after = full_attention_rope(base), full_attention_rope(run)
    if before.get("rope_type", "default") == "default":
        return True
    return before["rope_type"] == after.get("rope_type") and window_of(run) >= window_of(base)


def ntk_theta(config: Config, scale: float) -> float:
    """Return the base of the frequencies with which the lowest one is divided by `scale` (NTK-aware scaling).

    Frequency i of R/2 is `theta^(-2i/D)`: D is R, the rotary dimensions of a head, but all dimensions of a head under
    `proportional`. So theta grows by `scale^(D/(R-2))`.

    >>> round(ntk_theta({"head_dim": 64, "rope_theta": 1e5}, 2))
    204522
    """
    rope = full_attention_rope(config)
    head = config.get("qk_rope_head_dim") or config.get("head_dim")
    head = int(head or config["hidden_size"] // config["num_attention_heads"])
    if rope.get("rope_type") == "proportional":  # Gemma 4 has larger heads in its full-attention layers
        head = max(
            [head, *(int(layer.get("head_dim", 0)) for layer in (config.get("per_layer_config") or {}).values())]
        )
    rotated = int(head * float(rope.get("partial_rotary_factor") or 1)) // 2 * 2
    denominator = head if rope.get("rope_type") == "proportional" else rotated
    if rotated <= 2:
        raise ScalingError("scaling: theta: a head has one rotary frequency, which theta does not change; use pi")
    growth: float = scale ** (denominator / (rotated - 2))
    return float(rope["rope_theta"]) * growth


def _extended_rope(config: Config, extension: Extension) -> dict[str, Any]:
    """Return the rope of the full-attention layers after the extension."""
    rope, scale, method = full_attention_rope(config), extension.scale_of(config), extension.scaling
    kind = rope.setdefault("rope_type", "default")
    if method == "direct":
        return rope
    if method == "theta":
        theta = extension.theta or ntk_theta(config, scale)
        if theta <= rope["rope_theta"]:
            raise ScalingError(f"context.theta: {theta:g} is not larger than the model's own {rope['rope_theta']:g}")
        return {**rope, "rope_theta": theta}
    if method == "dynamic":
        return {**rope, "rope_type": "dynamic", "factor": scale}
    if method in ("yarn", "llama3"):
        new = {"rope_type": method, "factor": 1.0, "original_max_position_embeddings": extension.original_of(config)}
        own = rope if kind == method else {**rope, **new, **(LLAMA3_BANDS if method == "llama3" else {})}
        return _without_default_attention({**own, "factor": own["factor"] * scale}, own["factor"])
    if kind == "longrope" and constant_longrope(rope) is None:
        factors = [factor * scale for factor in rope["long_factor"]]
        longer = {"long_factor": factors, **({"factor": rope["factor"] * scale} if rope.get("factor") else {})}
        return {**rope, **longer}
    factor = (constant_longrope(rope) or float(rope.get("factor") or 1)) * scale
    if config.get("model_type") in LONGROPE_ONLY:
        return _constant_longrope(config, rope, factor, extension.target)
    return {**rope, "rope_type": "proportional" if kind == "proportional" else "linear", "factor": factor}


def _without_default_attention(rope: dict[str, Any], factor_before: float) -> dict[str, Any]:
    """Drop an `attention_factor` that is YaRN's own for the factor before: readers compute that of the new factor."""
    stated = rope.get("attention_factor")
    if stated is not None and math.isclose(stated, 0.1 * math.log(factor_before) + 1, rel_tol=1e-3):
        del rope["attention_factor"]
    return rope


def _constant_longrope(config: Config, rope: Config, factor: float, target: int) -> dict[str, Any]:
    """Return a `longrope` that divides every frequency by `factor`, for configs that accept no `linear` rope."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    factors = [factor] * (int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2)
    divided = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    # Readers derive a factor on attention, 1, from the two windows.
    return {**rope, **divided, "original_max_position_embeddings": target, "factor": 1.0, "attention_factor": 1.0}
