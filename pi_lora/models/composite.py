"""Composites: a language model in one checkpoint with towers for images or sound. The language model is meant.

It is built as transformers builds the whole, so that weights and adapters have the names that vLLM and PEFT look for in
the composite. The other parts are left out and take no memory.
"""

import inspect
import re
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from pi_lora.errors import ScalingError, first_line
from pi_lora.scaling.config import COMPOSITE, TEXT_CONFIG, Config


def language_class(config: PreTrainedConfig) -> Any:
    """Return the class of the language model of a composite; None for any other config."""
    if not hasattr(config, TEXT_CONFIG):
        return None
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING):
        if type(config) in mapping:
            return _without_other_parts(mapping[type(config)], type(config))
    return None


def auto_class_of(config: Config) -> str:
    """Return the name of the class of transformers that loads a model with this config as a whole."""
    if COMPOSITE not in config:
        return "AutoModelForCausalLM"
    if CONFIG_MAPPING[config[COMPOSITE]["model_type"]] in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return "AutoModelForImageTextToText"
    return "AutoModelForMultimodalLM"


def _without_other_parts(composite: Any, config_class: type[PreTrainedConfig]) -> Any:
    """Return a class like that of a composite, whose models have neither towers nor projectors."""

    def build(model: Any, *arguments: Any, **options: Any) -> None:
        composite.__init__(model, *arguments, **options)
        kept = {model.get_decoder(), model.get_output_embeddings()}
        model.other_parts = _leave_out_others(model, kept)
        classes = {type(module).__name__ for module in model.modules()}
        model._no_split_modules = classes & set(model._no_split_modules)

    attributes = {"__init__": build, "__module__": composite.__module__, "config_class": config_class}
    if "logits_to_keep" not in inspect.signature(composite.forward).parameters:
        attributes["forward"] = _forward_of_kept_logits(composite.forward)
    return type(composite.__name__, (composite,), attributes)


def _forward_of_kept_logits(forward: Any) -> Any:
    """Return a forward with the argument `logits_to_keep` of transformers, for a class that ignores it and computes the
    logits of all positions.
    """
    signature = inspect.signature(forward)
    kept_logits = inspect.Parameter("logits_to_keep", inspect.Parameter.KEYWORD_ONLY, default=0)
    parameters = sorted([*signature.parameters.values(), kept_logits], key=lambda parameter: parameter.kind)

    @wraps(forward)
    def forward_of_kept(model: Any, *arguments: Any, logits_to_keep: int | torch.Tensor = 0, **options: Any) -> Any:
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        head = model.get_output_embeddings()
        selection = head.register_forward_pre_hook(lambda _, inputs: inputs[0][:, kept])
        try:
            return forward(model, *arguments, **options)
        finally:
            selection.remove()

    # Trainers and `generate` look for names of arguments.
    vars(forward_of_kept)["__signature__"] = signature.replace(parameters=parameters)
    return forward_of_kept


def _leave_out_others(parent: nn.Module, kept: set[nn.Module], prefix: str = "") -> list[str]:
    """Replace the modules that hold none of the `kept` ones, and are in none of them, by None; return their names."""
    left_out = []
    for name, module in parent.named_children():
        if kept.isdisjoint(module.modules()):
            setattr(parent, name, None)
            left_out.append(prefix + name)
        elif module not in kept:
            left_out += _leave_out_others(module, kept, f"{prefix}{name}.")
    return left_out


def other_parts(model: Any) -> list[str]:
    """Return the names of the parts of a composite that are left out; none of any other model."""
    return getattr(model, "other_parts", [])


@torch.no_grad()
def check_reads_text_alone(model: Any) -> None:
    """Raise ScalingError if the forward of a composite on the meta device uses a part that is left out."""
    if not other_parts(model):
        return
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    try:
        model(input_ids=ids, use_cache=False)
    except Exception as error:  # also of code that looks at values, which the meta device lacks
        if "NoneType" in str(error):
            raise ScalingError(
                f"model of type {model.config.model_type}: cannot read text without its other parts "
                f"({first_line(error)}); choose another"
            ) from None


def adapter_renamings(model: Any) -> dict[str, str]:
    """Return a pattern of the names in an adapter of the language model alone, and what replaces it in a composite."""
    if not other_parts(model):
        return {}
    names = {module: name for name, module in model.named_modules()}
    return {r"\bmodel\.(?=(layers|norm|embed_tokens)\.)": f"{names[model.get_decoder()]}."}


def names_in(model: Any, stored_names: Iterable[str], *, fused: bool = False) -> dict[str, str]:
    """Return the names of weights in `model` by their names in a file: those of earlier versions of transformers, or,
    in a composite, those of the language model alone.

    With `fused`, tensors that transformers fuses when it loads them, such as the experts of a layer, have the name of
    the fused weight.
    """
    weights = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if fused and isinstance(transform, WeightConverter)]
    renamings_alone = adapter_renamings(model)
    names = {}
    for stored_name in stored_names:
        name = stored_name
        if name not in weights:
            name, _ = rename_source_key(stored_name, renamings, converters, model.base_model_prefix, weights)
        if name not in weights:
            for pattern, replacement in renamings_alone.items():
                name = re.sub(pattern, replacement, name)
        names[stored_name] = name
    return names
