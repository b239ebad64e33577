"""Whether the model that transformers builds obeys the scaling in its config; asked before any weights are read."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pi_lora.errors import ScalingError
from pi_lora.scaling.config import SLIDING_ATTENTION, Interpolation
from pi_lora.scaling.extend import extend_config

FREQUENCIES = "inv_freq"


def check_scaling(
    kind: type[PreTrainedConfig],
    config: Mapping[str, Any],
    interpolation: Interpolation,
    trust_remote_code: bool = False,
) -> None:
    """Nothing, if a model of `config` under `interpolation` gets rotary frequencies that follow from its plain ones.

    Config classes drop or reject a scaling, and models without positions carry a rope in their config all the same:
    what counts is what the model's own rotary modules compute. Under `pi` each frequency is the plain one divided by
    the scale, or unchanged on layers that slide; under `yarn` none is below that or above the plain one. `dynamic`
    acts on long inputs only, so its model is asked about `pi`.

    Raises:
        ScalingError: the frequencies are others, or the model has none.
    """
    if interpolation.method == "direct":
        return
    asked = replace(interpolation, method="pi") if interpolation.method == "dynamic" else interpolation
    plain = rotary_frequencies(kind, config, trust_remote_code)
    scaled = rotary_frequencies(kind, extend_config(config, asked), trust_remote_code)
    if not plain:
        raise ScalingError(
            f"model of type {kind.model_type}: is built without rotary embeddings; nothing to interpolate"
        )
    if not _follows(plain, scaled, asked):
        raise ScalingError(
            f"model of type {kind.model_type}: transformers does not apply the scaling of its config; "
            "it would be tuned and measured unscaled"
        )


def rotary_frequencies(
    kind: type[PreTrainedConfig], config: Mapping[str, Any], trust_remote_code: bool = False
) -> dict[str, torch.Tensor]:
    """The frequencies (radians a token) of each rotary module that a model of `config` is built with, by name.

    The model is built without memory for its weights; its rotary modules, which that leaves without numbers, are
    built again by themselves.

    Raises:
        ScalingError: transformers rejects the config, or a rotary module cannot be built by itself.
    """
    found = {}
    try:
        model = build_on_meta(kind, config, trust_remote_code)
        for name, module in model.named_modules():
            if any(buffer.endswith(FREQUENCIES) for buffer, _ in module.named_buffers(recurse=False)):
                for buffer, values in type(module)(config=module.config).named_buffers():
                    found[f"{name}.{buffer}"] = values
    except Exception as error:  # config classes and model code raise kinds of their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise ScalingError(f"model of type {kind.model_type}: cannot be built with this scaling ({reason})") from None
    return found


def build_on_meta(
    kind: type[PreTrainedConfig], config: Mapping[str, Any], trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build the model of `config` on the meta device: every module with its shape, no memory for weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            kind.from_dict(deepcopy(dict(config))), trust_remote_code=trust_remote_code
        )
    return model


def _follows(plain: dict[str, torch.Tensor], scaled: dict[str, torch.Tensor], interpolation: Interpolation) -> bool:
    if plain.keys() != scaled.keys() or any(plain[name].shape != scaled[name].shape for name in plain):
        return False
    changed = [name for name in plain if not torch.equal(plain[name], scaled[name])]
    if any(SLIDING_ATTENTION in name for name in changed):
        return False
    lowest = {name: plain[name] / interpolation.scale for name in changed}
    if interpolation.method == "pi":
        return bool(changed) and all(torch.allclose(scaled[name], lowest[name], rtol=1e-5, atol=0) for name in changed)
    slack = 1 + 1e-5
    return bool(changed) and all(
        bool((scaled[name] * slack >= lowest[name]).all() and (scaled[name] <= plain[name] * slack).all())
        for name in changed
    )
