"""This machine: device, dtypes, kernels and versions, and the facts for a bug report."""

import functools
import importlib
import importlib.metadata
import math
import os
import platform
import time
from contextlib import suppress
from typing import Any

import torch

from pi_lora.errors import ModelError
from pi_lora.models.host import has_bfloat16_instructions, host_memory
from pi_lora.recipe.schema import Recipe

# transformers' name of torch's attention, which chooses between cuDNN's kernel and torch's own.
SDPA = "sdpa"
LIBRARIES = ("pi-lora", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors")
OPTIONAL_LIBRARIES = ("bitsandbytes", "flash-attn", "liger-kernel", "lm-eval", "kernels", "vllm")
# Autocast converts what it multiplies, so bfloat16 has to be this many times as fast to gain anything.
MIN_BFLOAT16_SPEEDUP = 1.2
# The size of the square matrices whose product tells the speed of a processor.
PRODUCT_SIZE = 256


def device() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_fast_bfloat16() -> bool:
    """Return whether bfloat16 arithmetic is faster than float32.

    A GPU needs instructions for it; those before Ampere emulate it. A CPU is measured as well, since AVX512-BF16 alone
    is no proof: an AMD EPYC multiplies four times as fast in bfloat16, an Intel Xeon without usable AMX half as fast.
    """
    if device().type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return has_bfloat16_instructions() and bfloat16_speed() > MIN_BFLOAT16_SPEEDUP


def bfloat16_speed() -> float:
    """Return how many times as fast as in float32 this processor multiplies matrices in bfloat16."""
    rates = _processor_rates(torch.float32, torch.bfloat16)
    return rates[torch.bfloat16] / rates[torch.float32]


def processor_peak(dtype: torch.dtype | None = None) -> float:
    """Return the FLOP/s of this processor in products of matrices, of all threads, by default in the dtype that
    trainings use.
    """
    dtype = dtype or (torch.bfloat16 if has_fast_bfloat16() else torch.float32)
    [rate] = _processor_rates(dtype).values()
    return rate * torch.get_num_threads()


@functools.cache
def _processor_rates(*dtypes: torch.dtype) -> dict[torch.dtype, float]:
    """Measure the FLOP/s of this processor in products of matrices, by dtype: once, in 20 ms with fast instructions.

    A run that is resumed has to compute as it did before, so other work must not change the result. The best of twenty
    short rounds counts, alternating between the dtypes. There is one thread: other work would delay one of several.
    """
    best = dict.fromkeys(dtypes, math.inf)
    pairs = {dtype: torch.ones(2, PRODUCT_SIZE, PRODUCT_SIZE, dtype=dtype) for dtype in dtypes}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(20):
        for dtype, (left, right) in pairs.items():
            begin = time.perf_counter()
            left @ right
            best[dtype] = min(best[dtype], time.perf_counter() - begin)
    torch.set_num_threads(threads)
    operations = 2 * PRODUCT_SIZE**3
    return {dtype: operations / seconds for dtype, seconds in best.items()}


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype of that name, such as `bfloat16`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def free_memory(place: torch.device) -> int:
    """Return the bytes that this process can still take on a device; on a GPU also those that torch holds unused."""
    if place.type == "cpu":
        _, free = host_memory()
        return free
    free, _ = torch.cuda.mem_get_info(place)
    unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    return free + unused


def computes_in(recipe: Recipe) -> str:
    """Return the dtype in which a training step computes here; weights that train are float32 all the same."""
    return recipe.computes_in(device().type == "cpu", has_fast_bfloat16())


def dtype_of_base(recipe: Recipe) -> torch.dtype:
    """Return the dtype of a base that is tuned here."""
    return dtype_named(recipe.dtype_of_base(device().type == "cpu", has_fast_bfloat16()))


def measured_under_autocast(recipe: Recipe) -> bool:
    """Whether float32 weights are measured in bfloat16 as they were tuned: on a GPU, where float32 takes far longer."""
    if device().type == "cpu":
        return False
    return dtype_of_base(recipe) == torch.float32 and computes_in(recipe) == "bfloat16"


def use_liger(model: Any) -> None:
    """Use Liger's Triton kernels of rotary embeddings, norms and gated MLPs (Hsu et al. 2024) in `model`.

    The weights stay as they are, with or without an adapter. liger-kernel 0.8, an optional package, also replaces
    classes and functions of the architecture in this process. Raise ModelError if there are no kernels for it.
    """
    patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    # Imported here: it imports PEFT, which takes seconds, and merging does without.
    from transformers.integrations.liger import apply_liger_kernel

    model_type = model.config.model_type
    if model_type not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ModelError(f"model.kernels: liger has none for models of type {model_type}; leave the key out")
    # Liger's loss would replace the loss of TRL, which is computed in chunks, and the forward of the model.
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})


def versions(names: tuple[str, ...] = LIBRARIES) -> dict[str, str]:
    """Return the version of each library that is installed."""
    installed = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def hardware() -> str:
    """Return the architecture of the processor, the number of cores, and how many compute if torch uses fewer."""
    cores = os.cpu_count() or 1
    threads = torch.get_num_threads()
    used = f"{threads} of {cores}" if threads < cores else cores
    return f"{platform.machine()}, {used} cores"


def facts() -> dict[str, str]:
    """Return the facts for a bug report, by name: libraries, system, processor, memory, GPUs."""
    name = torch.cpu.get_capabilities().get("cpu_name") or platform.processor()
    total, available = (size / 2**30 for size in host_memory())
    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.1f} GiB"
        capability = f"{gpu.major}.{gpu.minor}"
        gpus.append(f"{gpu.name}, {memory}, compute capability {capability}")
    return {
        **versions(LIBRARIES + OPTIONAL_LIBRARIES),
        "Python": platform.python_version(),
        "system": platform.platform(),
        "processor": f"{name}, {hardware()}, bfloat16 {bfloat16_speed():.3g} times as fast as float32; "
        f"torch uses {torch.get_num_threads()} threads",
        "memory": f"{total:.1f} GiB, {available:.1f} GiB available",
        "GPUs": "; ".join(gpus) or "none",
    }
