"""The best that the card can do: a large product, a large copy, attention alone.

python ceilings.py HEADS WIDTH TOKENS
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ROUNDS = 20
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BACKENDS = {
    "SDPA as it chooses": None,
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def ceilings(heads: int, width: int, tokens: int) -> dict[str, object]:
    """Operations a second of a bfloat16 product, bytes a second of a copy, and attention's operations by kernel."""
    side = 8192 if ON_GPU else 256
    copied = 2**32 if ON_GPU else 2**20
    left = torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16)
    right = torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16)
    source = torch.zeros(copied, device=DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "product_side": side,
        "product": 2 * side**3 / best_seconds(lambda: left @ right),
        # Read once and written once.
        "copy": 2 * copied / best_seconds(lambda: target.copy_(source)),
        "attention": dict(attention_kernels(heads, width, tokens)),
    }


def attention_kernels(heads: int, width: int, tokens: int) -> Iterator[tuple[str, float]]:
    """Operations a second forward and backward of causal attention, its causal half counted once; kernels that cannot
    do it here are left out.
    """
    queries, keys, values = (
        torch.randn(1, heads, tokens, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )

    def both_ways() -> None:
        output = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        torch.autograd.grad(output.sum(), (queries, keys, values))

    # Two products forward and four backward, 2 operations a channel, over half of the pairs.
    operations = 3 * 2 * 2 * heads * width * tokens * tokens / 2
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend) if backend else nullcontext():
                yield name, operations / best_seconds(both_ways)
        except RuntimeError:  # torch says so when no kernel that is allowed can do it
            continue


def best_seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Of one call, the best of `rounds`, after one that warms up."""
    seconds = []
    for _ in range(rounds + 1):
        if ON_GPU:
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


if __name__ == "__main__":
    heads, width, tokens = (int(number) for number in sys.argv[1:])
    print(json.dumps(ceilings(heads, width, tokens)))
