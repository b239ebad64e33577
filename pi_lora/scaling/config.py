"""Ropes in model configs, as they are read and written in both dialects. No torch is needed.

transformers 5 nests everything in `rope_parameters`; transformers 4, vLLM and SGLang read top-level `rope_theta` and
`rope_scaling`. A composite (a vision-language model, for instance) has the config of its language model under
`text_config`; `language_config` takes it out and `whole_config` puts it back.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pi_lora.errors import ScalingError
from pi_lora.scaling.model_types import ModelType, facts_of

Config = Mapping[str, Any]

# Where a composite has the config of its language model, and where that config keeps the config of the composite here.
TEXT_CONFIG, COMPOSITE = "text_config", "composite_config"
# Config entries that say how weights are stored, and which code computes with them.
STORED_ENTRIES = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "auto_map")
# Config entries of a composite as a whole.
OUTER_ENTRIES = ("architectures", *STORED_ENTRIES)

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
LOCAL_ATTENTION = {SLIDING_ATTENTION, "chunked_attention"}
# The numbers of a `dynamic` rope that a plain one does not have.
DYNAMIC_ENTRIES = ("alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# Types of ropes without a factor, or with one that counts nowhere.
WITHOUT_FACTOR = ("default", "longrope")


def language_config(config: Config) -> dict[str, Any]:
    """Return the config of the language model of a composite, with the entries that say how weights are stored and,
    under `COMPOSITE`, the whole config. Return a copy of any other config.
    """
    text = config.get(TEXT_CONFIG)
    if not isinstance(text, Mapping):
        return dict(config)
    outer = {key: config[key] for key in OUTER_ENTRIES if key in config}
    return {**text, **outer, COMPOSITE: config}


def whole_config(config: Config) -> Config:
    """Return the config of a composite with a config from `language_config` in it; any other config as it is."""
    if COMPOSITE not in config:
        return config
    composite = config[COMPOSITE]
    own_entries = composite[TEXT_CONFIG]
    text = {}
    whole = {}
    for key, value in composite.items():
        if key not in OUTER_ENTRIES:
            whole[key] = value
    for key, value in config.items():
        if key in OUTER_ENTRIES:
            whole[key] = value
        if key in own_entries or key not in (COMPOSITE, *OUTER_ENTRIES):
            text[key] = value
    # vLLM builds the language model by the architecture that its own config names.
    for key in ("architectures", "auto_map"):
        if key in own_entries:
            text[key] = own_entries[key]
    return {**whole, TEXT_CONFIG: text}


def read_rope(config: Config) -> dict[str, Any]:
    """Return the complete `rope_parameters` of a config in either dialect, per layer type if the model has several."""
    if config.get("alibi"):
        raise refused(config, "has ALiBi, no rotary position embeddings; choose a model with rotary embeddings")
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and nested:
        rope = deepcopy(dict(nested))  # the config classes of transformers change their arguments in place
        for parameters in (rope, *rope.values()):
            # The name in transformers 4, which stays as it was when the `rope_type` changes, and which 4 prefers.
            if isinstance(parameters, dict) and "type" in parameters:
                parameters.setdefault("rope_type", parameters.pop("type"))
        return _with_constant_theta(config, rope)
    if config.get("rope_theta") is None:
        problem = "has no rotary position embeddings that its config describes"
        raise refused(config, f"{problem}; choose a model with rotary embeddings")
    scaling = dict(config.get("rope_scaling") or {})
    old_name = scaling.pop("type", "default")
    rope_type = scaling.pop("rope_type", old_name)
    full = {
        **scaling,
        "rope_type": rope_type,
        "rope_theta": config["rope_theta"],
    }
    if config.get("rope_local_base_freq") is None:
        return _with_constant_theta(config, full)
    sliding = {
        "rope_type": "default",
        "rope_theta": config["rope_local_base_freq"],
    }
    return {FULL_ATTENTION: full, SLIDING_ATTENTION: sliding}


def _with_constant_theta(config: Config, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the plain rope that a `dynamic` one with an `alpha` is in Hunyuan's models, any other rope as it is."""
    is_constant = facts_of(config.get("model_type")).constant_alpha
    if not (is_constant and rope.get("rope_type") == "dynamic" and rope.get("alpha")):
        return rope
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {**without_dynamic(rope), "rope_theta": rope["rope_theta"] * rope["alpha"] ** (head / (head - 2))}


def without_dynamic(rope: Config) -> dict[str, Any]:
    """Return the plain rope of a `dynamic` one."""
    plain = {key: value for key, value in rope.items() if key not in DYNAMIC_ENTRIES}
    return {**plain, "rope_type": "default"}


def refused(config: Config, why: str) -> ScalingError:
    """Return the error that says why a model of this type is refused."""
    model_type = config.get("model_type", "unknown")
    return ScalingError(f"model of type {model_type}: {why}")


def full_attention_rope(config: Config) -> dict[str, Any]:
    """Return the rope parameters of the layers that attend to the whole window, which always have a `rope_type`."""
    rope = read_rope(config)
    if "rope_theta" not in rope:
        if not isinstance(rope.get(FULL_ATTENTION), Mapping):
            layer_types = sorted(layer_type for layer_type, parameters in rope.items() if parameters)
            named = ", ".join(layer_types)
            raise refused(config, f"has ropes for {named}, none for {FULL_ATTENTION}; give a model that has one")
        rope = rope[FULL_ATTENTION]
    full = {"rope_type": "default", **rope}
    numbers = ["rope_theta"]
    if full["rope_type"] not in WITHOUT_FACTOR:
        numbers.append("factor")
    for key in numbers:
        if not isinstance(full.get(key, 1.0), int | float):
            raise refused(config, f"{key}: {full[key]!r} in its config is not a number; correct config.json")
    return full


def with_full_rope(config: Config, rope: Config) -> dict[str, Any]:
    """Return a copy of a config with `rope` for the layers that attend to the whole window."""
    nested = read_rope(config)
    if FULL_ATTENTION in nested:
        rope = {**nested, FULL_ATTENTION: rope}
    return {**config, "rope_parameters": rope}


def with_legacy_rope_keys(config: Config) -> dict[str, Any]:
    """Return a copy of a config whose scaling is read by transformers 5 and, at the top level, by 4, vLLM and SGLang.

    transformers 4 loads a config with `rope_parameters` alone unscaled, without a warning. Some models with ropes per
    layer type exist in transformers 5 only. They get no top level, which 5 would apply to the sliding layers too.
    """
    nested = read_rope(config)
    rope = full_attention_rope(config)
    facts = facts_of(config.get("model_type"))
    both = {**config, "rope_parameters": nested}
    if FULL_ATTENTION in nested and not facts.layered_in_4:
        both.pop("rope_theta", None)
        both.pop("rope_scaling", None)
        return both
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            both[key] = rope[key]
            both[facts.names_in_4.get(key, key)] = rope[key]
    if sliding := nested.get(SLIDING_ATTENTION):
        both["rope_local_base_freq"] = sliding["rope_theta"]
    both["rope_scaling"] = _legacy_rope_scaling(rope, facts)
    return both


def _legacy_rope_scaling(rope: Config, facts: ModelType) -> dict[str, Any] | None:
    """Return the `rope_scaling` of transformers 4 for a rope; None for a default one with a single position."""
    kind = rope["rope_type"]
    if kind == "default" and "mrope_section" not in rope:
        return None
    keys = rope.keys() - {"rope_theta", "partial_rotary_factor"}
    if kind == "longrope" and facts.accepts_longrope_only:
        keys = {"short_factor", "long_factor"}
    elif kind == "longrope" or facts.two_fields_in_4:
        keys -= {"rope_type"}
    elif kind == "linear":
        # CTranslate2 reads theta only here; transformers 4 warns that it does not need it.
        keys |= {"rope_theta"}
    scaling = {key: value for key, value in rope.items() if key in keys}
    return {"type": kind, **scaling}


def local_window(config: Config) -> int | None:
    """Return the longest attention span of any layer in tokens; None if a layer attends to the whole window.

    >>> local_window({"sliding_window": 4096}), local_window({"sliding_window": 4096, "use_sliding_window": False})
    (4096, None)
    """
    # transformers follows `layer_types` if the config has them, else `sliding_window` in every layer.
    kinds = set(config.get("layer_types") or [SLIDING_ATTENTION])
    if kinds - LOCAL_ATTENTION or config.get("use_sliding_window") is False:
        return None
    window = config.get("sliding_window") or 0
    chunk = config.get("attention_chunk_size") or 0
    return max(window, chunk) or None


@dataclass(frozen=True)
class RopeConfig:
    """The rope of the layers that attend to the whole window, as a config states it."""

    config: Config

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The parameters as transformers 5 names them; ScalingError if the model has none, or no numbers."""
        return full_attention_rope(self.config)

    @property
    def rope_type(self) -> str:
        """The `rope_type` of configs."""
        return str(self.parameters["rope_type"])

    @property
    def facts(self) -> ModelType:
        """The special rules of the type of the model."""
        return facts_of(self.config.get("model_type"))

    @cached_property
    def dimensions(self) -> tuple[int, int]:
        """The dimensions of a head of the full-attention layers, and those that are rotated."""
        config = self.config
        if config.get("qk_rope_head_dim"):
            # Multi-head latent attention: a part of each head that is rotated as a whole.
            rotated = int(config["qk_rope_head_dim"])
            return rotated, rotated
        head = config.get("head_dim") or config.get("attention_head_dim")
        head = int(head or config["hidden_size"] // config["num_attention_heads"])
        if self.rope_type == "proportional":
            # Gemma 4 has larger heads in its full-attention layers.
            layers = config.get("per_layer_config") or {}
            for layer in layers.values():
                head = max(head, int(layer.get("head_dim", 0)))
        return head, int(head * float(self.parameters.get("partial_rotary_factor") or 1))

    @cached_property
    def frequencies(self) -> list[float]:
        """The unscaled rotary frequencies in radians a token, the highest first. Under `proportional` the dimensions
        that are not rotated have a frequency of 0.
        """
        head, rotated = self.dimensions
        theta = float(self.parameters["rope_theta"])
        if self.rope_type != "proportional":
            return [theta ** (-index / rotated) for index in range(0, rotated, 2)]
        frequencies = [theta ** (-index / head) for index in range(0, rotated - 1, 2)]
        return frequencies + [0.0] * (head // 2 - len(frequencies))

    @property
    def fixed_divisors(self) -> list[float] | None:
        """The divisors of a `longrope` that has the same for short and long inputs; None for any other rope."""
        rope = self.parameters
        if self.rope_type != "longrope" or rope["short_factor"] != rope["long_factor"]:
            return None
        return list(rope["long_factor"])

    @property
    def constant_divisor(self) -> float | None:
        """The divisor of all frequencies of a `longrope` that is PI; None for any other rope."""
        divisors = set(self.fixed_divisors or ())
        return float(divisors.pop()) if len(divisors) == 1 else None

    @property
    def factor(self) -> float:
        """The number that configs call `factor`; 1 without one."""
        return float(self.constant_divisor or self.parameters.get("factor") or 1)
