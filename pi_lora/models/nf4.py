"""NF4 weights (QLoRA, Dettmers et al. 2023) as bitsandbytes computes with them, alike on every processor."""

import importlib.metadata

from torch import nn


def keep_as_quantized(model: nn.Module) -> None:
    """Let the NF4 layers of `model` compute from the weights as they were quantized, whatever the processor.

    On processors with AVX512-BF16, bitsandbytes 0.50 repacks a layer at its first forward in evaluation mode. It fails
    where the inner size is no multiple of the block size of 64 or the outer one of 32, rounds the scales of the blocks
    to bfloat16, and does not undo it for training, whose gradients then do not pass the layer.
    """
    from bitsandbytes.nn.modules import Linear4bit  # an optional package

    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False


def nf4_kernel(device_type: str) -> str:
    """Return what multiplies by NF4 weights on `cpu` or `cuda`, with its version."""
    how = "weights dequantized" if device_type == "cpu" else "bitsandbytes' choice of CUDA kernel"
    return f"bitsandbytes {importlib.metadata.version('bitsandbytes')}, NF4, {how}"
