"""The extension of a model config to a longer window, or why it is refused. No torch is needed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pi_lora.errors import ScalingError
from pi_lora.scaling.config import Config, local_window, with_full_rope, with_legacy_rope_keys
from pi_lora.scaling.model_types import POSITION_ENTRIES
from pi_lora.scaling.rope import ORIGINAL_WINDOW, Rope
from pi_lora.scaling.scalings import SCALINGS, ExtensionOptions

# A config entry beside the rope that transformers prefers to the one in the rope.
ORIGINAL_BESIDE = "original_max_position_embeddings"
# What is possible with a model that no scaling extends.
WITHIN_WINDOW = "tune it by scaling: keep within its window"


@dataclass(frozen=True)
class Extension(ExtensionOptions):
    """The extension of an unextended base to `target` tokens. `original` is the window L, by default the longest
    sequences of the training. `theta` is the new base of the frequencies for the scaling `theta`, by default NTK-aware.
    `factors`, `attention_factor` and `searched` are those of the scaling `factors`: a divisor of each frequency, a
    factor of cosines and sines, and the windows L and L' that the divisors were searched for.
    """

    def original_of(self, rope: Rope) -> int:
        """Return the original window L of the model in tokens."""
        return self.original or rope.trained

    def notes(self, rope: Rope) -> Iterator[str]:
        """Yield what a user should know of L, and of the entries of the config that are left out."""
        yield from original_notes(rope, self.original_of(rope))
        for key, treatment in POSITION_ENTRIES.items():
            if treatment == "dropped" and rope.config.get(key):
                yield f"{key}: is left out; engines would compute it instead of the scaling, and transformers does not"


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
    check_extendable(Rope(config), extension)
    rope = Rope(config).plain
    original = extension.original_of(rope)
    scaling = SCALINGS[extension.scaling]
    # A base whose frequencies are scaled already is extended from the window that it was scaled for.
    before = rope.window if rope.is_scaled else original
    resolved = replace(extension, original=original)
    after = Rope(with_full_rope(config, scaling.parameters(rope, resolved, extension.target / before)))
    divisor = 1.0 if after.kind.states_original else after.window_factor
    declared = round(extension.target / divisor)
    if after.factor == rope.factor and declared * divisor < extension.target:
        declared += 1
    extended = {**after.config, "max_position_embeddings": declared}
    extended.pop(ORIGINAL_WINDOW, None)
    if extended.get("head_dim", 0) is None:
        # transformers (5.23) computes the frequencies of yarn with the entry as it is, as in Mixtral's config.
        extended["head_dim"], _ = after.dimensions
    if ORIGINAL_BESIDE in extended and ORIGINAL_BESIDE in after.parameters:
        extended[ORIGINAL_BESIDE] = after.parameters[ORIGINAL_BESIDE]
    has_lists = after.rope_type == "longrope" and after.constant_divisor is None
    if has_lists or not scaling.is_recorded:
        extended[ORIGINAL_WINDOW] = original
    if after.fixed_divisors:
        extended[ORIGINAL_BESIDE] = declared
    if _never_limits(rope):
        extended["sliding_window"] = max(extended["sliding_window"], extension.target)
    for key, treatment in POSITION_ENTRIES.items():
        if treatment == "scaled" and extended.get(key):
            extended[key] = declared
        elif treatment == "dropped":
            extended.pop(key, None)
    return with_legacy_rope_keys(extended)


def original_notes(rope: Rope, original: int) -> Iterator[str]:
    """Yield where L is from, if it is not the window that the config of a model declares."""
    window = rope.window
    if original == window:
        return
    where = f"context.original: {original} tokens, and its config declares {window}"
    if original != rope.trained:
        yield f"{where}; leave it out if that is right"
    elif rope.training:
        yield f"{where}: it was trained on {original} ({rope.training.said})"
    else:
        yield f"{where}: beyond {original} its frequencies depend on the length of the input"


def check_extendable(rope: Rope, extension: Extension) -> None:
    """Raise ScalingError if the target window is not longer, the model's rope cannot be extended by this scaling, or no
    rotary layer attends to the target window.
    """
    model_type = rope.config.get("model_type")
    method = extension.scaling
    original = extension.original_of(rope)
    target = extension.target
    suitable = rope.scalings
    problem = None
    longest = max(original, rope.window) if rope.is_scaled else original
    refused = [key for key, treatment in POSITION_ENTRIES.items() if treatment == "refused" and rope.config.get(key)]
    if target <= longest:
        problem = f"context.target: {target} is not longer than the model's own window of {longest}; {WITHIN_WINDOW}"
    elif refused:
        why = "its own code changes positions by the length of the input"
        problem = f"model of type {model_type}: {refused[0]}: {why}; set it to false in config.json"
    elif rope.facts.only_local_rope:
        why = "only its local-attention layers are rotary; nothing to interpolate"
        problem = f"model of type {model_type}: {why}; {WITHIN_WINDOW}"
    elif method not in SCALINGS:
        problem = f"scaling: {method}: no such scaling; choose from {', '.join(suitable)}"
    elif method not in suitable:
        advice = f"{WITHIN_WINDOW} of {rope.window} tokens, or start from an unextended base"
        if suitable:
            advice = f"use {' or '.join(suitable)}"
        problem = f"scaling: {method}: not possible for a {model_type} model with rope type {rope.rope_type}; {advice}"
    elif _is_beyond_layers(rope, target) and not _never_limits(rope):
        limit = f"every layer of this model attends to at most {local_window(rope.config)} tokens"
        problem = f"context.target: {target}: {limit}; choose a model with full attention"
    elif original > rope.plain.window and (rope.is_scaled or rope.rope_type == "dynamic"):
        own = f"this base is scaled already, and has a window of {rope.plain.window} tokens"
        problem = f"context.original: {extension.original}: {own}; leave it out"
    elif method == "factors" or extension.factors:
        problem = _factors_problem(rope, extension)
    if problem:
        raise ScalingError(problem)


def check_reach(name: str, rope: Rope, target: int) -> None:
    """Raise ScalingError if a model reads fewer than `target` tokens as it is (`scaling: keep`)."""
    window = rope.window
    if target > window:
        advice = "extend it first, or lower the target" if rope.scalings else "lower the target"
        raise ScalingError(
            f"context.target: {target} is longer than the window of {name}, {window} tokens, "
            f"which scaling: keep does not change; {advice}"
        )
    if _is_beyond_layers(rope, target):
        limit = f"every layer of {name} attends to at most {local_window(rope.config)} tokens"
        raise ScalingError(
            f"context.target: {target}: {limit}; lower the target, or choose a model with full attention"
        )


def _is_beyond_layers(rope: Rope, target: int) -> bool:
    reach = local_window(rope.config)
    return reach is not None and reach < target


def _never_limits(rope: Rope) -> bool:
    """Whether all layers slide by a `sliding_window` that is no shorter than the context window, as in Ministral 8B:
    every token attends to all before it, also after an extension.
    """
    return local_window(rope.config) is not None and (rope.config.get("sliding_window") or 0) >= rope.window


def _factors_problem(rope: Rope, extension: Extension) -> str | None:
    """Return why the divisors do not suit a model; None if they do."""
    factors = extension.factors
    if extension.scaling != "factors":
        return f"--factors: have no effect under scaling: {extension.scaling}; use factors, or leave them out"
    if factors is None:
        return "context.factors: scaling: factors needs them; name a file that pi-lora search wrote"
    frequencies = len(rope.frequencies)
    if len(factors) != frequencies:
        return f"context.factors: {len(factors)} numbers; the model has {frequencies} rotary frequencies"
    windows = (extension.original_of(rope), extension.target)
    if extension.searched and extension.searched != windows:
        searched = "{:,} to {:,} tokens".format(*extension.searched)
        asked = "{:,} to {:,}".format(*windows)
        return f"context.factors: were searched for {searched}, not {asked}; search again for this model and target"
    if extension.attention_factor != 1 and rope.facts.accepts_longrope_only:
        model_type = rope.config["model_type"]
        return f"context.factors: attention_factor: transformers 4 drops it for {model_type}; leave it out"
    return None
