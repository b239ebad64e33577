"""Liger's Triton kernels of rotary embeddings, norms and gated MLPs (Hsu et al. 2024), an optional package."""

import importlib
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from pi_lora.errors import ModelError

PACKAGE = "liger_kernel"
# TRL computes the loss in chunks, which Liger's would replace together with the model's forward.
OWN_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def check_supported(model_type: str) -> None:
    """Raise ModelError if Liger, which is installed, has no kernels for models of that type."""
    if model_type not in _patches().MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ModelError(f"model.kernels: liger has none for models of type {model_type}; leave the key out")


def use_liger(model: nn.Module) -> None:
    """Compute the layers of `model`, with or without an adapter, by Liger's kernels; its weights stay as they are. The
    classes and functions of its architecture are replaced for this process, too (liger-kernel 0.8).
    """
    base: PreTrainedModel = unwrap_peft_model(model)
    check_supported(base.config.model_type)
    _patches()._apply_liger_kernel_to_instance(model=base, **OWN_LOSS)


def _patches() -> Any:
    return importlib.import_module(f"{PACKAGE}.transformers.monkey_patch")
