"""A model config stretched to a longer window, or refused with the reason; config dictionaries, no torch."""

from typing import Any

from pi_lora.errors import ScalingError
from pi_lora.scaling.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Config,
    Interpolation,
    full_attention_rope,
    in_both_dialects,
    method_of,
    read_rope,
    scale_of,
    window_of,
)

LOCAL_ATTENTION = {SLIDING_ATTENTION, "chunked_attention"}
# Their configs accept no scaling but `longrope`, which divides each frequency by a number of its own: one for all is PI
LONGROPE_ONLY = {"phi3", "phi4_multimodal"}
# Their rotary layers are the sliding ones, and those that see everything have no positions; no config says so.
LOCAL_ROPE_ONLY = set("afmoe cohere2 cohere2_moe exaone4 exaone_moe flint kolibri1 llama4_text".split())


def extend_config(config: Config, interpolation: Interpolation) -> dict[str, Any]:
    """A copy of a model config that reads `interpolation.target` tokens, in both dialects.

    `pi` makes the rope `linear`, or multiplies the factor of one that is. `dynamic` and `yarn` are written as
    transformers computes them. Ropes per layer type change on full-attention layers only. `direct` declares the
    longer window, no more. `max_position_embeddings` becomes what every reader needs:

    - L under `linear` and `dynamic`: engines multiply it by the factor, and `dynamic` starts to act there;
    - L' under `yarn`: transformers 4 computes the factor from it, and SGLang takes it as it is.

    Raises:
        ScalingError: the model cannot be stretched so, with the reason.
    """
    refuse_what_cannot_be_stretched(config, interpolation)
    nested = read_rope(config)
    rope, declared = _stretched_rope(config, interpolation)
    extended = dict(config)
    extended["rope_parameters"] = {**nested, FULL_ATTENTION: rope} if FULL_ATTENTION in nested else rope
    extended["max_position_embeddings"] = declared
    if rope.get("rope_type") == "longrope":
        extended["original_max_position_embeddings"] = declared
    return in_both_dialects(extended)


def refuse_what_cannot_be_stretched(config: Config, interpolation: Interpolation) -> None:
    """Nothing, for a model that `interpolation` can stretch.

    Raises:
        ScalingError: another rope type, or no layer that both has positions and sees the target window.
    """
    model_type, method = config.get("model_type"), interpolation.method
    rope = full_attention_rope(config)
    kind = rope.get("rope_type", "default")
    own = method_of(config)
    if kind != "default" and own != "pi":
        raise ScalingError(
            f"rope_type {kind}: this model's positions are already stretched in another way, or never were plain; "
            "start from an unextended base (only default and linear can be interpolated)"
        )
    if own == "pi" and method in ("dynamic", "yarn"):
        raise ScalingError(
            f"scaling: {method}: this model is already interpolated ({kind}); start from its unextended base, or use pi"
        )
    if model_type in LONGROPE_ONLY and method in ("dynamic", "yarn"):
        raise ScalingError(
            f"scaling: {method}: transformers reads no such rope for models of type {model_type}; use pi"
        )
    if model_type in LOCAL_ROPE_ONLY:
        raise ScalingError(
            f"model of type {model_type}: only its local-attention layers have rotary positions, and those that see "
            "the whole window have none; nothing to interpolate"
        )
    reach = local_window(config)
    if reach is not None and reach < interpolation.target:
        raise ScalingError(
            f"context.target: {interpolation.target}: every layer of this model looks back {reach} tokens at most, "
            "which no scaling of positions changes; choose a model with full attention"
        )


def refuse_what_does_not_reach(name: str, config: Config, target: int) -> None:
    """Nothing, for a model that reads `target` tokens as it is (`scaling: keep`).

    Raises:
        ScalingError: it reads fewer.
    """
    if (window := window_of(config)) < target:
        raise ScalingError(
            f"context.target: {target} is more than the {window} tokens that {name} reads, and scaling: keep leaves it "
            "at them; extend it first, or lower the target"
        )


def local_window(config: Config) -> int | None:
    """How many tokens the layer that sees farthest looks back, or None where a layer sees the whole window.

    transformers obeys `layer_types` where a model has them, else `sliding_window` in every layer, unless
    `use_sliding_window` turns it off.

    >>> local_window({"sliding_window": 4096}), local_window({"sliding_window": 4096, "use_sliding_window": False})
    (4096, None)
    """
    kinds = set(config.get("layer_types") or [SLIDING_ATTENTION])
    if kinds - LOCAL_ATTENTION or config.get("use_sliding_window") is False:
        return None
    return max(config.get("sliding_window") or 0, config.get("attention_chunk_size") or 0) or None


def leads_to(base: Config, run: Config) -> bool:
    """Whether `run` can have been stretched from `base`: any from a plain rope, by `pi` only from a `linear` one."""
    if full_attention_rope(base).get("rope_type", "default") == "default":
        return True
    return method_of(base) == method_of(run) == "pi" and scale_of(run) >= scale_of(base)


def _stretched_rope(config: Config, interpolation: Interpolation) -> tuple[dict[str, Any], int]:
    """The rope of the full-attention layers under `interpolation`, and `max_position_embeddings` to go with it."""
    rope, scale = full_attention_rope(config), interpolation.scale
    if interpolation.method == "dynamic":
        return {**rope, "rope_type": "dynamic", "factor": scale}, interpolation.original
    if interpolation.method == "yarn":
        of_yarn = {"factor": scale, "original_max_position_embeddings": interpolation.original}
        return {**rope, "rope_type": "yarn", **of_yarn}, interpolation.target
    factor = scale_of(config) * scale
    if factor == 1.0:
        return {**rope, "rope_type": "default"}, interpolation.target
    if config.get("model_type") in LONGROPE_ONLY:
        return _as_longrope(config, rope, factor, interpolation.target), interpolation.target
    return {**rope, "rope_type": "linear", "factor": factor}, round(interpolation.target / factor)


def _as_longrope(config: Config, rope: Config, factor: float, window: int) -> dict[str, Any]:
    """PI in the words of `longrope`: every frequency divided by the same `factor`, and attention left as it is.

    Its window is declared as the original one as well, or readers would derive a factor on attention from the ratio.
    """
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    factors = [factor] * (int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2)
    return {
        **rope,
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": window,
        "factor": 1.0,
        "attention_factor": 1.0,
    }
