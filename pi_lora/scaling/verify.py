"""Check that the model transformers builds applies the scaling of its config, before any weights are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from math import isclose
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pi_lora.errors import ScalingError, last_line
from pi_lora.scaling.config import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    Config,
    whole_config,
)
from pi_lora.scaling.extension import Extension, extend_config
from pi_lora.scaling.rope import Rope


def config_of(kind: type[PreTrainedConfig], config: Config) -> PreTrainedConfig:
    """Return a config dictionary as a config object. transformers changes its argument in place, so it gets a copy."""
    return kind.from_dict(deepcopy(dict(whole_config(config))))


def build_on_meta(kind: type[PreTrainedConfig], config: Config, what: str = "this scaling") -> PreTrainedModel:
    """Build the model of `config` on the meta device: every module with its shape, no memory for weights. Raise
    ScalingError, which names `what` the config has, if transformers cannot build it.
    """
    with _building(kind, what), torch.device("meta"):
        typed = config_of(kind, config)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(typed)
    return model


def check_scaling(plain: PreTrainedModel, config: Config, extension: Extension) -> None:
    """Raise ScalingError if the model of `config` under `extension` does not have the rotary frequencies, or the factor
    of cosines and sines, that its config says. `plain` is the unextended model on the meta device.

    Config classes may drop or reject a scaling, and configs of models without positions may have a rope. Sliding layers
    keep their frequencies. `dynamic` scales long inputs only, so its model is checked with `pi`.
    """
    checked = extension
    if extension.scaling == "dynamic":
        checked = replace(extension, scaling="pi")
    kind = type(plain.config)
    plain_frequencies = rotary_frequencies(plain)
    if not plain_frequencies:
        raise ScalingError(f"model of type {kind.model_type}: is built without rotary embeddings; choose another")
    extended = extend_config(config, checked)
    model = build_on_meta(kind, extended)
    scaled = rotary_frequencies(model)
    changed = {name: values for name, values in scaled.items() if not _equal(values, plain_frequencies.get(name))}
    follows = bool(changed) and scaled.keys() == plain_frequencies.keys()
    if follows:
        rope = Rope(extended)
        expected = torch.tensor(rope.scaled_frequencies).sort().values
        for name, values in changed.items():
            # ERNIE 4.5 VL has them in another order.
            is_expected = values.shape == expected.shape and torch.allclose(values.sort().values, expected, 1e-5, 0)
            follows = follows and is_expected and SLIDING_ATTENTION not in name
        factors = attention_factors(model)
        follows = follows and all(isclose(factor, rope.attention_factor, rel_tol=1e-5) for factor in factors)
    if not follows:
        raise ScalingError(
            f"model of type {kind.model_type}: transformers does not apply the scaling of its config; "
            "choose another model"
        )


def _equal(values: torch.Tensor, others: torch.Tensor | None) -> bool:
    return others is not None and torch.equal(values, others)


def _rotary_modules(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield the rotary modules of a model on the meta device by name, built again with values."""
    for name, module in model.named_modules():
        buffers = [buffer for buffer, _ in module.named_buffers(recurse=False)]
        if any(buffer.endswith("inv_freq") for buffer in buffers):
            kind: Any = type(module)
            yield name, kind(config=module.config)


def rotary_frequencies(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the frequencies (radians a token) of each rotary module of a model on the meta device, by name. The meta
    device leaves buffers without values, so the rotary modules are built again by themselves. A `longrope` is asked
    about its longest input, for which its long factors count.
    """
    frequencies = {}
    with _building(type(model.config)):
        for name, rotary in _rotary_modules(model):
            if getattr(rotary, "rope_type", None) == "longrope":
                last_position = rotary.config.max_position_embeddings - 1
                rotary(torch.zeros(1), torch.tensor([[last_position]]))
            for buffer, values in rotary.named_buffers():
                frequencies[f"{name}.{buffer}"] = values
    return frequencies


def attention_factors(model: PreTrainedModel) -> list[float]:
    """Return the factor of cosines and sines that each rotary module gives: the cosine of the first position."""
    factors = []
    with _building(type(model.config)):
        for _, rotary in _rotary_modules(model):
            has_types = isinstance(getattr(rotary, "rope_type", None), dict)
            layer = {"layer_type": FULL_ATTENTION} if has_types else {}
            first_position = torch.zeros(1, 1, dtype=torch.long)
            output = rotary(torch.zeros(1), first_position, **layer)
            parts = output if isinstance(output, tuple) else (output,)
            largest = max(part.abs().max() for part in parts)
            factors.append(float(largest))
    return factors


@contextmanager
def _building(kind: type[PreTrainedConfig], what: str = "this scaling") -> Iterator[None]:
    """Turn every exception while a model is built into a ScalingError."""
    try:
        yield
    except Exception as error:  # config classes and model code raise their own kinds
        reason = last_line(error)
        raise ScalingError(f"model of type {kind.model_type}: cannot be built with {what} ({reason:.200})") from None
