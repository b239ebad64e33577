"""The machine and the libraries that a model is computed with: in the provenance of a run, and in reports of bugs."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from contextlib import suppress

LIBRARIES = ("pi-lora", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors")
OPTIONAL = ("bitsandbytes", "flash-attn", "lm-eval", "kernels", "vllm")


def versions(names: tuple[str, ...] = LIBRARIES) -> dict[str, str]:
    """Return the version of each library that is installed."""
    found = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def hardware() -> str:
    """Return the processor's architecture and how many cores there are."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


def facts() -> dict[str, str]:
    """Return what a report of a bug needs, by name: libraries, system, processor, memory, GPUs, kernels."""
    import psutil
    import torch

    from pi_lora.models.attention import SDPA, attention_kernel, flash_attention_kernels
    from pi_lora.models.base import device, has_bfloat16_instructions, has_fast_bfloat16
    from pi_lora.models.nf4 import nf4_kernel

    libraries, in_bfloat16 = versions(LIBRARIES + OPTIONAL), has_fast_bfloat16()
    kernels = ", ".join([SDPA, "eager", *flash_attention_kernels()])
    instructions = "with" if has_bfloat16_instructions() else "without"
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.processor()
    memory = psutil.virtual_memory()
    return {
        **libraries,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "processor": f"{name}, {hardware()}, {instructions} bfloat16 instructions; torch uses "
        f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available",
        "GPUs": "; ".join(_gpus()) or "none",
        "CUDA": torch.version.cuda or "none: torch is built for CPUs",
        "precision": f"training.precision: auto is {'bfloat16' if in_bfloat16 else 'float32'}",
        "attention": f"model.attention: auto is {attention_kernel('auto', in_bfloat16)}; there are {kernels}",
        "quantization": nf4_kernel(device().type) if "bitsandbytes" in libraries else "none: no bitsandbytes",
    }


def _gpus() -> Iterator[str]:
    import torch

    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, compute capability {gpu.major}.{gpu.minor}"
