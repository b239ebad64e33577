"""What the card can do at best, measured where everything else is: a large product, a large copy, attention alone."""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from on_gpu.setting import Setting
from pi_lora.models.device import device

ROUNDS = 20
BACKENDS = {
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def ceilings(setting: Setting) -> dict[str, object]:
    """Operations a second of a bfloat16 product, bytes a second of a copy, and attention's operations by kernel."""
    on_gpu = device().type == "cuda"
    side, copied = (8192, 2**32) if on_gpu else (256, 2**20)
    left, right = (torch.randn(side, side, device=device(), dtype=torch.bfloat16) for _ in range(2))
    source = torch.zeros(copied, device=device(), dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "product_side": side,
        "product": 2 * side**3 / best_seconds(lambda: left @ right),
        # Read once and written once.
        "copy": 2 * copied / best_seconds(lambda: target.copy_(source)),
        "attention": dict(attention_kernels(setting)),
    }


def attention_kernels(setting: Setting) -> Iterator[tuple[str, float]]:
    """Operations a second forward and backward of causal attention at the shape's heads, its causal half counted once;
    kernels that cannot do it here are left out.
    """
    shape, tokens = setting.shape, setting.compared
    width = shape.queries // shape.heads
    queries, keys, values = (
        torch.randn(1, shape.heads, tokens, width, device=device(), dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )

    def both_ways() -> None:
        output = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        torch.autograd.grad(output.sum(), (queries, keys, values))

    # Two products forward and four backward, 2 operations a channel, over half of the pairs.
    operations = 3 * 2 * 2 * shape.queries * tokens * tokens / 2
    for name, backend in [("SDPA as it chooses", None), *BACKENDS.items()]:
        try:
            with sdpa_kernel(backend) if backend else nullcontext():
                yield name, operations / best_seconds(both_ways)
        except RuntimeError:  # torch says so when no kernel that is allowed can do it
            continue


def best_seconds(work: Callable[[], object]) -> float:
    """Of one call, the best of several, after one that warms up."""
    on_gpu, seconds = device().type == "cuda", []
    for _ in range(ROUNDS + 1):
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
