"""Check that the model transformers builds applies the scaling of its config, before any weights are read."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pi_lora.errors import ScalingError
from pi_lora.scaling.config import SLIDING_ATTENTION, Config, Extension, Method, extend_config


def config_of(kind: type[PreTrainedConfig], config: Config) -> PreTrainedConfig:
    """Return a dictionary as an object of transformers, which changes what it is given in place."""
    return kind.from_dict(deepcopy(dict(config)))


def build_on_meta(
    kind: type[PreTrainedConfig], config: Config, trust_remote_code: bool = False, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Build the model of `config` on the meta device: every module with its shape, no memory for weights."""
    with _building(kind), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config_of(kind, config), trust_remote_code=trust_remote_code, dtype=dtype
        )
    return model


def check_scaling(plain: PreTrainedModel, config: Config, extension: Extension, trust: bool = False) -> None:
    """Raise ScalingError if the rotary frequencies of the model of `config` under `extension`, which changes some,
    do not follow from those of `plain`, the same on the meta device without it.

    Config classes drop or reject a scaling, and models without positions have a rope in their config all the same, so
    the frequencies of the model's own rotary modules are compared. Under `pi` each frequency is the plain one divided
    by the scale; under `yarn` and `llama3` it lies between the two; under `theta` the first stays and the others fall.
    Sliding layers keep theirs. `dynamic` scales long inputs only, so its model is checked with `pi`.
    """
    asked = replace(extension, scaling="pi") if extension.scaling == "dynamic" else extension
    kind = type(plain.config)
    frequencies = rotary_frequencies(plain)
    scaled = rotary_frequencies(build_on_meta(kind, extend_config(config, asked), trust))
    if not frequencies:
        raise ScalingError(f"model of type {kind.model_type}: is built without rotary embeddings; choose another")
    if not _follows(frequencies, scaled, asked.scaling, asked.scale_of(config)):
        raise ScalingError(
            f"model of type {kind.model_type}: transformers does not apply the scaling of its config; "
            "choose another model"
        )


def rotary_frequencies(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the frequencies (radians a token) of each rotary module of a model on the meta device, by name. The meta
    device leaves its buffers without values, so the rotary modules are built again by themselves. A `longrope` is asked
    about its longest input, for which its long factors count.
    """
    frequencies = {}
    with _building(type(model.config)):
        for name, module in model.named_modules():
            if any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False)):
                rotary = type(module)(config=module.config)
                if getattr(rotary, "rope_type", None) == "longrope":
                    rotary(torch.zeros(1), torch.tensor([[module.config.max_position_embeddings - 1]]))
                for buffer, values in rotary.named_buffers():
                    frequencies[f"{name}.{buffer}"] = values
    return frequencies


@contextmanager
def _building(kind: type[PreTrainedConfig]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # config classes and model code raise their own kinds
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        raise ScalingError(
            f"model of type {kind.model_type}: cannot be built with this scaling ({reason:.200})"
        ) from None


def _follows(plain: dict[str, torch.Tensor], scaled: dict[str, torch.Tensor], method: Method, scale: float) -> bool:
    if plain.keys() != scaled.keys() or any(plain[name].shape != scaled[name].shape for name in plain):
        return False
    changed = [name for name in plain if not torch.equal(plain[name], scaled[name])]
    slack = 1 + 1e-5
    for name in changed:
        lowest = plain[name] * 0 if method == "theta" else plain[name] / scale
        highest = lowest if method == "pi" else plain[name]
        within = (scaled[name] * slack >= lowest) & (scaled[name] <= highest * slack)
        if SLIDING_ATTENTION in name or not within.all():
            return False
    return bool(changed)
