"""The lengths that `longest` tries: the plan says where to begin, and only what ran counts."""

from collections.abc import Callable, Mapping
from typing import Any

# As Unsloth's figures were made: an adapter alone, of rank 32. The levers are those that cost little time.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "tuning": {"rank": 32, "modules_to_save": "nothing"},
    "training": {"mlp_chunk_tokens": 4096, "optimizer": "paged_adamw_8bit"},
    "hardware": {"offload_activations": True},
}
# A paged optimizer and offloading need a GPU.
CHANGES_ON_CPU: Mapping[str, Mapping[str, Any]] = {"tuning": CHANGES["tuning"], "training": {"mlp_chunk_tokens": 16}}


def pinned_bytes(layers: int, hidden: int, tokens: int) -> int:
    """Host memory of the offloaded inputs of all layers, in bfloat16: pinned blocks are rounded up to powers of two.

    >>> pinned_bytes(32, 4096, 347_000) == 32 * 2**32
    True
    """
    block: int = 1 << (2 * hidden * tokens - 1).bit_length()
    return layers * block


def longest_that_fits(step: int, most: int, fits: Callable[[int], bool]) -> int:
    """The longest multiple of `step` tokens, up to `most`, that fits; one step if none does.

    >>> longest_that_fits(10, 1000, lambda tokens: tokens <= 345)
    340
    """
    low = 1
    high = most // step + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle
    return low * step


def next_length(first: int, step: int, ran: Mapping[int, bool]) -> int | None:
    """The next length in tokens: the first, then a tenth more or less; `ran` says which lengths were tried and ran.

    >>> [next_length(100, 1, ran) for ran in ({}, {100: True}, {100: False}, {100: True, 110: True})]
    [100, 110, 90, None]
    >>> next_length(100, 64, {128: True}) is None  # a tenth is less than a step
    True
    """
    if not ran:
        return first
    ((tried, it_ran), *others) = ran.items()
    ratio = 1.1 if it_ran else 0.9
    steps = int(tried * ratio // step)
    tokens = max(step, steps * step)
    return None if others or tokens in ran else tokens
