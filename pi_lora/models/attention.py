"""The attention kernel that `model.attention: auto` chooses."""

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available

from pi_lora.models.base import device

SDPA = "sdpa"
# By the major number of the GPU's compute capability. FlashAttention 3 and 4 each support one generation (Shah et al.
# 2024 for Hopper). torch's own flash kernel is FlashAttention 2, so installing that package gains nothing.
_MADE_FOR = {
    9: ("flash_attention_3", is_flash_attn_3_available),
    10: ("flash_attention_4", is_flash_attn_4_available),
}


def attention_kernel(asked: str, in_bfloat16: bool, context_parallel: int = 1) -> str:
    """Return the kernel by transformers' name: the one asked for, or for `auto` the one written for this GPU if it is
    installed, else torch's, which chooses between cuDNN's and its own. FlashAttention does not support float32, and
    context parallelism supports only torch's kernel (accelerate 1.15).
    """
    if asked != "auto":
        return asked
    if device().type == "cpu" or not in_bfloat16 or context_parallel > 1:
        return SDPA
    generation, _ = torch.cuda.get_device_capability()
    name, is_present = _MADE_FOR.get(generation, (SDPA, lambda: True))
    return name if is_present() else SDPA


def flash_attention_kernels() -> list[str]:
    """Return the kernels of FlashAttention that `model.attention` may name here."""
    made = {"flash_attention_2": is_flash_attn_2_available, **dict(_MADE_FOR.values())}
    return [name for name, is_present in made.items() if is_present()]
