"""Scalings of rotary frequencies in model configs, as they are read and written (scaling/extension.py extends them). No
torch is needed.

A model trained on positions `[0, L)` reads `L' > L` tokens when position `m` is replaced by `m L / L'`
(paper.tex, Eqn. 4), or when its rotary frequencies change in another way. Configs call `L' / L` the `factor`.

- `pi`: every frequency divided by the factor (rope type `linear`; in a `longrope` its long factors, multiplied);
- `yarn` (Peng et al. 2023) and `llama3` (Dubey et al. 2024): low frequencies divided, high ones kept;
- `theta`: a larger base of the frequencies (NTK-aware; bloc97 2023, Roziere et al. 2023);
- `dynamic`: NTK by the length of the input, for comparison;
- `factors`: a divisor of its own for each frequency, as `pi-lora search` finds them (LongRoPE2, Shang et al. 2025);
  in configs a `longrope` with equal short and long lists;
- `direct`: nothing changes (the paper's FT).

Configs come in two dialects: transformers 5 nests everything in `rope_parameters`; transformers 4, vLLM and SGLang read
top-level `rope_theta` and `rope_scaling`. A composite (a vision-language model, for instance) has the config of its
language model under `text_config`; `language_config` takes it out and `whole_config` puts it back.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

from pi_lora.errors import ScalingError

Config = Mapping[str, Any]
Method = Literal["pi", "yarn", "theta", "llama3", "dynamic", "direct", "factors"]
# Those that a rope type stands for.
METHOD_OF_TYPE: Mapping[str, Method] = {
    "linear": "pi",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
}

# The config key of the original window in tokens, if the model was extended by `theta`, or by `pi` under a `longrope`.
# Ropes do not record these extensions.
ORIGINAL_WINDOW = "original_context_window"

# Where a composite has the config of its language model, and where that config keeps the config of the composite here.
TEXT_CONFIG, COMPOSITE = "text_config", "composite_config"
# Config entries that say how weights are stored, and which code computes with them.
STORED_ENTRIES = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "auto_map")
# Config entries of a composite as a whole.
OUTER_ENTRIES = ("architectures", *STORED_ENTRIES)

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
# Models with a rope per layer type. Their `rope_scaling` in transformers 4 applies to full-attention layers.
LAYERED_IN_4 = {"gemma3_text", "gemma3n_text", "olmo3"}
# Models whose configs in transformers 4 reject a `rope_scaling` with fields other than `type` and `factor`.
TWO_FIELDS_IN_4 = {"olmo", "olmo2"}
# Models with other names for theta and the rotary share of a head in transformers 4 (and the `rope_scaling` path of 5).
GPT_NEOX = {"gpt_neox", "gpt_neox_japanese"}
GPT_NEOX_IN_4 = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
# Models whose `max_position_embeddings` under `linear` is the extended window, in published configs and in vLLM.
WINDOW_DECLARED = {"gemma3_text", "gemma3n_text"}
LOCAL_ATTENTION = {SLIDING_ATTENTION, "chunked_attention"}
MULTIPLIES_WINDOW = {"linear", "dynamic", "yarn", "proportional"}
WITH_FACTOR = {*MULTIPLIES_WINDOW, "llama3"}
# Models whose configs accept only `longrope`, a list of divisors of the frequencies. Equal divisors are PI. In
# transformers 4 they accept no key but the two lists.
LONGROPE_ONLY = {"phi3", "phi4_multimodal"}
# vLLM's names of the factor of the attention in a `longrope`.
VLLM_ATTENTION_KEYS = ("short_mscale", "long_mscale")
# Models whose sliding layers alone are rotary; layers with full attention have no positions. No config says so.
LOCAL_ROPE_ONLY = set("afmoe cohere2 cohere2_moe exaone4 exaone_moe flint kolibri1 llama4_text".split())
# Models whose tokens see later ones, such as the whole input of PaliGemma: text has no next token to predict.
NOT_CAUSAL = {"diffusion_gemma", "paligemma"}


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
        raise _refused(config, "has ALiBi, no rotary position embeddings; choose a model with rotary embeddings")
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and nested:
        rope = deepcopy(dict(nested))  # the config classes of transformers change their arguments in place
        for parameters in (rope, *rope.values()):
            # The name in transformers 4, which stays as it was when the `rope_type` changes, and which 4 prefers.
            if isinstance(parameters, dict) and "type" in parameters:
                parameters.setdefault("rope_type", parameters.pop("type"))
        return rope
    if config.get("rope_theta") is None:
        problem = "has no rotary position embeddings that its config describes"
        raise _refused(config, f"{problem}; choose a model with rotary embeddings")
    scaling = dict(config.get("rope_scaling") or {})
    old_name = scaling.pop("type", "default")
    rope_type = scaling.pop("rope_type", old_name)
    full = {
        **scaling,
        "rope_type": rope_type,
        "rope_theta": config["rope_theta"],
    }
    if config.get("rope_local_base_freq") is None:
        return full
    sliding = {
        "rope_type": "default",
        "rope_theta": config["rope_local_base_freq"],
    }
    return {FULL_ATTENTION: full, SLIDING_ATTENTION: sliding}


def _refused(config: Config, why: str) -> ScalingError:
    model_type = config.get("model_type", "unknown")
    return ScalingError(f"model of type {model_type}: {why}")


def full_attention_rope(config: Config) -> dict[str, Any]:
    """Return the rope parameters of the layers that attend to the whole window, which always have a `rope_type`."""
    rope = read_rope(config)
    if "rope_theta" not in rope:
        if not isinstance(rope.get(FULL_ATTENTION), Mapping):
            layer_types = sorted(layer_type for layer_type, parameters in rope.items() if parameters)
            named = ", ".join(layer_types)
            raise _refused(config, f"has ropes for {named}, none for {FULL_ATTENTION}; give a model that has one")
        rope = rope[FULL_ATTENTION]
    full = {"rope_type": "default", **rope}
    numbers = ["rope_theta"]
    if full["rope_type"] in WITH_FACTOR:
        numbers.append("factor")
    for key in numbers:
        if not isinstance(full.get(key, 1.0), int | float):
            raise _refused(config, f"{key}: {full[key]!r} in its config is not a number; correct config.json")
    return full


def with_full_rope(config: Config, rope: Config) -> dict[str, Any]:
    """Return a copy of a config with `rope` for the layers that attend to the whole window."""
    nested = read_rope(config)
    if FULL_ATTENTION in nested:
        rope = {**nested, FULL_ATTENTION: rope}
    return {**config, "rope_parameters": rope}


def fixed_longrope(rope: Config) -> list[float] | None:
    """Return the divisors of a `longrope` that has the same for short and long inputs; None for any other rope."""
    if rope["rope_type"] != "longrope" or rope["short_factor"] != rope["long_factor"]:
        return None
    return list(rope["long_factor"])


def constant_longrope(rope: Config) -> float | None:
    """Return the divisor of all frequencies of a `longrope` that is PI; None for any other rope."""
    divisors = fixed_longrope(rope)
    if not divisors or len(set(divisors)) > 1:
        return None
    return float(divisors[0])


def depends_on_length(config: Config) -> bool:
    """Whether the length of an input changes the rotary frequencies, and so the states of the first tokens."""
    rope = full_attention_rope(config)
    if rope["rope_type"] == "dynamic":
        return True
    return rope["rope_type"] == "longrope" and fixed_longrope(rope) is None


def method_of(config: Config) -> Method | None:
    """Return the method by which a model was extended, according to its config. Return None for an unextended model,
    for `direct`, and for a `longrope` that the model was trained with.

    >>> method_of({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}})
    'pi'
    """
    rope = full_attention_rope(config)
    if config.get(ORIGINAL_WINDOW):
        if fixed_longrope(rope):
            return "factors"
        return "pi" if rope["rope_type"] == "longrope" else "theta"
    if constant_longrope(rope) is not None:
        return "pi"
    if rope["rope_type"] == "proportional" and "factor" in rope:
        return "pi"
    return METHOD_OF_TYPE.get(rope["rope_type"])


def scale_of(config: Config) -> float:
    """Return the factor L'/L by which a model is extended, by any method; 1 if it is not, and for `direct`.

    >>> scale_of({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}})
    8.0
    """
    rope = full_attention_rope(config)
    if original := config.get(ORIGINAL_WINDOW):
        return window_of(config) / float(original)
    if factor := constant_longrope(rope):
        return factor
    return float(rope["factor"]) if method_of(config) else 1.0


def original_of(config: Config) -> int:
    """Return the window L in tokens before a model was extended, by any method; the window of a model that is not.

    The factor of `llama3` is not the ratio of windows: Llama 3.1 reads 131,072 tokens by a factor of 8 from 8,192.
    """
    rope = full_attention_rope(config)
    if rope["rope_type"] == "llama3":
        return int(rope["original_max_position_embeddings"])
    return round(window_of(config) / scale_of(config))


def window_of(config: Config) -> int:
    """Return the context window of a model in tokens, by the rule of transformers and vLLM.

    The factor of a `linear`, `dynamic` or `proportional` rope multiplies `max_position_embeddings`. That of `yarn`
    multiplies `original_max_position_embeddings`. With other types (`llama3`, `longrope`), and for Gemma 3 under
    `linear`, the window is `max_position_embeddings`.

    >>> rope = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 1e4}
    >>> window_of({"model_type": "gemma3_text", "max_position_embeddings": 131072, **rope})
    131072
    """
    if not config.get("max_position_embeddings"):
        raise _refused(config, "its config has no max_position_embeddings, the context window; add it to config.json")
    rope = full_attention_rope(config)
    window = int(config["max_position_embeddings"])
    # Some configs have the key of yarn without a number.
    if rope["rope_type"] == "yarn" and rope.get("original_max_position_embeddings"):
        window = rope["original_max_position_embeddings"]
    return round(window * window_factor(config, rope))


def window_factor(config: Config, rope: Config) -> float:
    """Return the factor by which engines multiply the window that a config with this rope declares."""
    rope_type = rope["rope_type"]
    if rope_type not in MULTIPLIES_WINDOW:
        return 1.0
    if rope_type == "linear" and config.get("model_type") in WINDOW_DECLARED:
        return 1.0
    return float(rope.get("factor", 1))


def normalize_max_positions(config: dict[str, Any], longest_input: float | None) -> dict[str, Any]:
    """Return a config with a `linear` rope that multiplies `max_position_embeddings`, as transformers documents it.

    Some published configs (DeepSeek-Coder, Chinese-Alpaca-2-16k) declare the extended window there instead. No key
    marks them, but the `longest_input` of their tokenizer, in tokens, is the same number.
    """
    declared = config.get("max_position_embeddings")
    if declared is None or declared != longest_input:
        return config
    factor = window_factor(config, full_attention_rope(config))
    return {**config, "max_position_embeddings": round(declared / factor)}


def with_legacy_rope_keys(config: Config) -> dict[str, Any]:
    """Return a copy of a config whose scaling is read by transformers 5 and, at the top level, by 4, vLLM and SGLang.

    transformers 4 loads a config with `rope_parameters` alone unscaled, without a warning. Some models with ropes per
    layer type exist in transformers 5 only. They get no top level, which 5 would apply to the sliding layers too.
    """
    nested = read_rope(config)
    rope = full_attention_rope(config)
    model_type = str(config.get("model_type"))
    both = {**config, "rope_parameters": nested}
    if FULL_ATTENTION in nested and model_type not in LAYERED_IN_4:
        both.pop("rope_theta", None)
        both.pop("rope_scaling", None)
        return both
    legacy_names = GPT_NEOX_IN_4 if model_type in GPT_NEOX else {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            both[key] = rope[key]
            both[legacy_names.get(key, key)] = rope[key]
    if sliding := nested.get(SLIDING_ATTENTION):
        both["rope_local_base_freq"] = sliding["rope_theta"]
    both["rope_scaling"] = _legacy_rope_scaling(rope, model_type)
    return both


def _legacy_rope_scaling(rope: Config, model_type: str) -> dict[str, Any] | None:
    """Return the `rope_scaling` of transformers 4 for a rope; None for a default one with a single position."""
    kind = rope["rope_type"]
    if kind == "default" and "mrope_section" not in rope:
        return None
    keys = rope.keys() - {"rope_theta", "partial_rotary_factor"}
    if kind == "longrope" and model_type in LONGROPE_ONLY:
        keys = {"short_factor", "long_factor"}
    elif kind == "longrope" or model_type in TWO_FIELDS_IN_4:
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


def is_extension_of(run: Config, base: Config) -> bool:
    """Return whether `run` can be an extension of `base`. If `base` is extended already, the rope types are equal."""
    type_before = full_attention_rope(base)["rope_type"]
    if type_before == "default":
        return True
    rope_type = full_attention_rope(run)["rope_type"]
    return rope_type == type_before and window_of(run) >= window_of(base)


def rotary_frequencies_of(config: Config) -> list[float]:
    """Return the unscaled rotary frequencies in radians a token, the highest first. Under `proportional` the dimensions
    that are not rotated have a frequency of 0.

    >>> rotary_frequencies_of({"head_dim": 4, "rope_theta": 1e4})
    [1.0, 0.01]
    """
    rope = full_attention_rope(config)
    head, rotated = rotary_dimensions(config, rope)
    theta = float(rope["rope_theta"])
    if rope["rope_type"] != "proportional":
        return [theta ** (-index / rotated) for index in range(0, rotated, 2)]
    frequencies = [theta ** (-index / head) for index in range(0, rotated - 1, 2)]
    return frequencies + [0.0] * (head // 2 - len(frequencies))


def rotary_dimensions(config: Config, rope: Config) -> tuple[int, int]:
    """Return the dimensions of a head of the full-attention layers, and those that are rotated."""
    if config.get("qk_rope_head_dim"):
        # Multi-head latent attention: a part of each head that is rotated as a whole.
        rotated = int(config["qk_rope_head_dim"])
        return rotated, rotated
    head = config.get("head_dim") or config.get("attention_head_dim")
    head = int(head or config["hidden_size"] // config["num_attention_heads"])
    if rope["rope_type"] == "proportional":
        # Gemma 4 has larger heads in its full-attention layers.
        layers = config.get("per_layer_config") or {}
        for layer in layers.values():
            head = max(head, int(layer.get("head_dim", 0)))
    return head, int(head * float(rope.get("partial_rotary_factor") or 1))
