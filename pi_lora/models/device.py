"""What computes: the device, its free memory, and whether it is faster in bfloat16."""

import functools
import math
import time

import torch

from pi_lora.models.host import has_bfloat16_instructions, host_memory

# Autocast converts what it multiplies, so bfloat16 has to be this many times as fast to gain anything.
ENOUGH = 1.2


def device() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_fast_bfloat16() -> bool:
    """Return whether bfloat16 arithmetic is faster than float32: on a GPU with instructions for it (those before Ampere
    emulate it), and on a CPU that has them and is measured to be faster. AVX512-BF16 alone is no proof: an AMD EPYC
    multiplies four times as fast in bfloat16, an Intel Xeon whose AMX is not to be had at half the speed.
    """
    if device().type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return has_bfloat16_instructions() and bfloat16_speed() > ENOUGH


@functools.cache
def bfloat16_speed() -> float:
    """Measure how many times as fast as in float32 this processor multiplies matrices in bfloat16: once, in 20 ms.

    The best of twenty short rounds each, in turns and on one thread, is the same beside other work, which would delay
    one of several threads: a run that is resumed has to compute as it did before.
    """
    best = {torch.float32: math.inf, torch.bfloat16: math.inf}
    pairs = {dtype: torch.ones(2, 256, 256, dtype=dtype) for dtype in best}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(20):
        for dtype, (left, right) in pairs.items():
            begin = time.perf_counter()
            left @ right
            best[dtype] = min(best[dtype], time.perf_counter() - begin)
    torch.set_num_threads(threads)
    return best[torch.float32] / best[torch.bfloat16]


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype of that name, such as `bfloat16`."""
    found: torch.dtype = getattr(torch, name)
    return found


def free_memory(place: torch.device) -> int:
    """Return the bytes that this process can still take on a device; on a GPU also those that torch holds unused."""
    if place.type == "cpu":
        return host_memory()[1]
    free, _ = torch.cuda.mem_get_info(place)
    return free + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
