"""Position Interpolation itself, and what model configs say about it: numbers and dictionaries, no torch.

A model trained on positions `[0, L)` reads `L' > L` tokens when position `m` is replaced by `m L / L'`
(paper.tex, Eqn. 4). Configs call `L' / L` the `factor` of a `linear` rope; `dynamic` (NTK) and `yarn` (Peng et al.
2023) are computed by transformers, for comparison. Configs come in two dialects: transformers 5 nests everything in
`rope_parameters`; transformers 4, vLLM and SGLang read top-level `rope_theta` and `rope_scaling`.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from pi_lora.errors import ScalingError

Config = Mapping[str, Any]
Method = Literal["pi", "direct", "dynamic", "yarn"]

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
# With ropes per layer type, for which transformers 4 has one `rope_scaling` that applies to full-attention layers.
LAYERED_IN_4 = {"gemma3_text", "gemma3n_text", "olmo3"}
# Their configs in transformers 4 reject a `rope_scaling` with fields other than `type` and `factor`.
TWO_FIELDS_IN_4 = {"olmo", "olmo2"}
# Whose names for theta and the rotary share of a head are others in transformers 4 (and the `rope_scaling` path of 5).
GPT_NEOX = {"gpt_neox", "gpt_neox_japanese"}
GPT_NEOX_IN_4 = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


@dataclass(frozen=True)
class Interpolation:
    """An extension from the `original` window (L, tokens) to the `target` window (L', tokens). `pi` rescales positions;
    `dynamic` and `yarn` change frequencies; `direct` changes nothing (FT in the paper).
    """

    method: Method
    original: int
    target: int

    def __post_init__(self) -> None:
        if self.target <= self.original:
            window = f"the model's own window of {self.original}"
            raise ScalingError(f"context.target: {self.target} is not longer than {window}; nothing to extend")

    @property
    def scale(self) -> float:
        """L'/L, the `factor` of configs; 1 for `direct`."""
        return 1.0 if self.method == "direct" else self.target / self.original


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


def constant_longrope(rope: Config) -> float | None:
    """Return what a `longrope` written by `extend.py` divides every frequency by; None for any other rope."""
    factors = {*rope.get("short_factor", []), *rope.get("long_factor", [])}
    return float(factors.pop()) if rope.get("rope_type") == "longrope" and len(factors) == 1 else None


def method_of(config: Config) -> Method | None:
    """Return how a model was extended according to its config; None for an unextended one, and for `direct`.

    >>> method_of({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}})
    'pi'
    """
    rope = full_attention_rope(config)
    if constant_longrope(rope) is not None:
        return "pi"
    methods: dict[str, Method] = {"linear": "pi", "dynamic": "dynamic", "yarn": "yarn"}
    return methods.get(rope.get("rope_type", "default"))


def scale_of(config: Config) -> float:
    """Return the factor L'/L by which a model is extended, by any method; 1 if it is not, and for `direct`.

    >>> scale_of({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}})
    8.0
    """
    rope = full_attention_rope(config)
    return constant_longrope(rope) or (float(rope["factor"]) if method_of(config) else 1.0)


def window_of(config: Config) -> int:
    """Return the context window of a model in tokens, by vLLM's rule. A `linear` or `dynamic` rope multiplies
    `max_position_embeddings`, `yarn` its `original_max_position_embeddings`; with other types (`llama3`, `longrope`)
    the window is as declared.
    """
    if config.get("max_position_embeddings") is None:
        raise _refused(config, "its config has no max_position_embeddings, the context window; add it to config.json")
    rope = full_attention_rope(config)
    kind = rope.get("rope_type")
    multiplied: int = rope["original_max_position_embeddings"] if kind == "yarn" else config["max_position_embeddings"]
    factor: float = rope["factor"] if kind in ("linear", "dynamic", "yarn") else 1
    return round(multiplied * factor)


def in_both_dialects(config: Config) -> dict[str, Any]:
    """Return a copy of a config whose scaling is read by transformers 5 and, at the top level, by 4, vLLM and SGLang.
    transformers 4 loads a config with `rope_parameters` alone silently unscaled. Models with ropes per layer type that
    only transformers 5 knows get no top level, which 5 would apply to the sliding layers too.
    """
    nested, rope = read_rope(config), full_attention_rope(config)
    both = {**config, "rope_parameters": nested}
    model_type = str(config.get("model_type"))
    if FULL_ATTENTION in nested and model_type not in LAYERED_IN_4:
        return {key: value for key, value in both.items() if key not in ("rope_theta", "rope_scaling")}
    names = GPT_NEOX_IN_4 if model_type in GPT_NEOX else {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            both[key] = both[names.get(key, key)] = rope[key]
    if SLIDING_ATTENTION in nested:
        both["rope_local_base_freq"] = nested[SLIDING_ATTENTION]["rope_theta"]
    both["rope_scaling"] = _rope_scaling(rope, model_type)
    return both


def _rope_scaling(rope: Config, model_type: str) -> dict[str, Any] | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if constant_longrope(rope) is not None:
        # Phi-3's config in transformers 4 accepts exactly these three.
        return {"type": kind, "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    elsewhere = {"rope_theta", "partial_rotary_factor"} | ({"rope_type"} if model_type in TWO_FIELDS_IN_4 else set())
    return {"type": kind, **{key: value for key, value in rope.items() if key not in elsewhere}}
