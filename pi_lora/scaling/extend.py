"""Extend a model config to a longer window, or refuse it with the reason; config dictionaries, no torch."""

from typing import Any

from pi_lora.errors import ScalingError
from pi_lora.scaling import config as rules
from pi_lora.scaling.config import FULL_ATTENTION, SLIDING_ATTENTION, Config, Interpolation, full_attention_rope

LOCAL_ATTENTION = {SLIDING_ATTENTION, "chunked_attention"}
# Their configs accept only `longrope`, which divides each frequency by its own number; the same one for all is PI.
LONGROPE_ONLY = {"phi3", "phi4_multimodal"}
# Only their sliding layers are rotary; layers with full attention have no positions. No config says so.
LOCAL_ROPE_ONLY = set("afmoe cohere2 cohere2_moe exaone4 exaone_moe flint kolibri1 llama4_text".split())


def extend_config(config: Config, interpolation: Interpolation) -> dict[str, Any]:
    """Return a copy of a model config with a window of `interpolation.target` tokens, in both dialects.

    Ropes per layer type change on full-attention layers only; `direct` declares the longer window alone.
    `max_position_embeddings` is what every reader needs:

    - L under `linear` and `dynamic`: engines multiply it by the factor, and `dynamic` scales inputs longer than it;
    - L' under `yarn`: transformers 4 computes the factor from it, and SGLang takes it as the window.
    """
    check_extendable(config, interpolation)
    nested = rules.read_rope(config)
    rope, declared = _stretched_rope(config, interpolation)
    extended = dict(config)
    extended["rope_parameters"] = {**nested, FULL_ATTENTION: rope} if FULL_ATTENTION in nested else rope
    extended["max_position_embeddings"] = declared
    if rope.get("rope_type") == "longrope":
        extended["original_max_position_embeddings"] = declared
    return rules.in_both_dialects(extended)


def check_extendable(config: Config, interpolation: Interpolation) -> None:
    """Raise ScalingError if the rope has another type, or no layer has positions and attends to the target window."""
    model_type, method = config.get("model_type"), interpolation.method
    rope = full_attention_rope(config)
    kind = rope.get("rope_type", "default")
    own = rules.method_of(config)
    problem, target, reach = None, interpolation.target, local_window(config)
    if kind != "default" and own != "pi":
        problem = f"rope_type {kind}: positions are already extended in another way; start from an unextended base"
    elif own == "pi" and method in ("dynamic", "yarn"):
        problem = f"scaling: {method}: this model is already interpolated ({kind}); use pi, or its unextended base"
    elif model_type in LONGROPE_ONLY and method in ("dynamic", "yarn"):
        problem = f"scaling: {method}: transformers does not support it for models of type {model_type}; use pi"
    elif model_type in LOCAL_ROPE_ONLY:
        problem = f"model of type {model_type}: only its local-attention layers are rotary; nothing to interpolate"
    elif reach is not None and reach < target:
        limit = f"every layer of this model attends to at most {reach} tokens"
        problem = f"context.target: {target}: {limit}; choose a model with full attention"
    if problem:
        raise ScalingError(problem)


def check_reach(name: str, config: Config, target: int) -> None:
    """Raise ScalingError if a model's own window is shorter than `target` tokens (`scaling: keep`)."""
    if (window := rules.window_of(config)) < target:
        beyond = f"{target} is longer than the window of {name}, {window} tokens, which scaling: keep does not change"
        raise ScalingError(f"context.target: {beyond}; extend it first, or lower the target")


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


def leads_to(base: Config, run: Config) -> bool:
    """Return whether `run` can be an extension of `base`: by any method of a plain rope, by `pi` of a `linear` one."""
    if full_attention_rope(base).get("rope_type", "default") == "default":
        return True
    return rules.method_of(base) == rules.method_of(run) == "pi" and rules.scale_of(run) >= rules.scale_of(base)


def _stretched_rope(config: Config, interpolation: Interpolation) -> tuple[dict[str, Any], int]:
    """Return the rope of the full-attention layers under `interpolation`, and its `max_position_embeddings`."""
    rope, scale = full_attention_rope(config), interpolation.scale
    if interpolation.method == "dynamic":
        return {**rope, "rope_type": "dynamic", "factor": scale}, interpolation.original
    if interpolation.method == "yarn":
        of_yarn = {"factor": scale, "original_max_position_embeddings": interpolation.original}
        return {**rope, "rope_type": "yarn", **of_yarn}, interpolation.target
    factor = rules.scale_of(config) * scale
    if factor == 1.0:
        return {**rope, "rope_type": "default"}, interpolation.target
    if config.get("model_type") in LONGROPE_ONLY:
        return _as_longrope(config, rope, factor, interpolation.target), interpolation.target
    return {**rope, "rope_type": "linear", "factor": factor}, round(interpolation.target / factor)


def _as_longrope(config: Config, rope: Config, factor: float, window: int) -> dict[str, Any]:
    """Return PI as a `longrope`: every frequency is divided by the same `factor`, attention is not scaled."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    factors = [factor] * (int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2)
    return {
        **rope,
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": window,  # readers derive a factor on attention from the two windows
        "factor": 1.0,
        "attention_factor": 1.0,
    }
