"""A model without its weights: what transformers calls each of them, which are tied, transposed or quantized."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from pi_lora.model import quiet_loading


@dataclass(frozen=True)
class Names:
    """By stored name: what a tensor is computed under; and those that are computed as parts of others."""

    computed: Mapping[str, str]
    joined: frozenset[str]


def skeleton(folder: Path) -> PreTrainedModel:
    """The float32 model of a folder's `config.json`; weights take no memory, buffers are real."""
    with quiet_loading(), init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
    return model.eval()


def computed_names(model: PreTrainedModel, stored: Iterable[str]) -> Names:
    """What `model` calls the tensors that files call `stored`.

    transformers 5 computes some architectures under other names than it stores them under, and joins tensors (experts);
    its own mapping says how, the one that PEFT relies on as well.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    joining = [each for each in mapping if isinstance(each, WeightConverter)]
    # Tied weights are in it under each of their names.
    state = model.state_dict()
    found, joined = {}, set()
    for name in sorted(stored, key=dot_natural_key):
        computed, pattern = rename_source_key(name, renamings, joining, model.base_model_prefix, state)
        if computed not in state and name in state:
            computed, pattern = name, None
        if pattern is not None:
            joined.add(name)
        elif computed in state:
            found[name] = computed
    return Names(found, frozenset(joined))


def tied_weights(model: PreTrainedModel) -> dict[str, str]:
    """The weights that `model` does not store, and which one each of them is."""
    return dict(model.all_tied_weights_keys)


def output_embedding(model: PreTrainedModel) -> str:
    """The name of the weight that makes logits."""
    head = model.get_output_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is head)


def transposed_weights(model: nn.Module) -> frozenset[str]:
    """The linear weights that are stored inputs x outputs."""
    return frozenset(f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D))


def quantized_weights(model: PreTrainedModel) -> frozenset[str]:
    """The weights that transformers keeps in four bits when it loads `model` quantized by bitsandbytes."""
    left_out = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or [])]
    return frozenset(
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) is nn.Linear and should_convert_module(name, left_out)
    )
