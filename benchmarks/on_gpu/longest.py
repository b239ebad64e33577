"""The lengths that `longest` tries: the plan says where to begin, and only what ran counts."""

from collections.abc import Callable, Mapping

# As Unsloth's figures were made: an adapter alone, of rank 32. The levers are those that cost little time.
CHANGES = {
    "tuning": {"rank": 32, "also_train": "nothing"},
    "training": {"mlp_chunk_tokens": 4096, "optimizer": "paged_adamw_8bit"},
    "hardware": {"offload_activations": True},
}
# A paged optimizer and offloading need a GPU.
CHANGES_ON_CPU = {"tuning": CHANGES["tuning"], "training": {"mlp_chunk_tokens": 16}}


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
    low, high = 1, most // step + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle)
    return low * step


def next_length(first: int, step: int, tries: int, ran: Mapping[int, bool]) -> int | None:
    """The next length in tokens after those in `ran`, which says of each whether it ran: a tenth up until one fails, or
    down until one runs, then halfway between. None after `tries`.

    >>> [next_length(100, 1, 4, ran) for ran in ({}, {100: True}, {100: True, 110: False})]
    [100, 110, 105]
    """
    if len(ran) >= tries:
        return None
    if not ran:
        return first
    good = max((tokens for tokens, it_ran in ran.items() if it_ran), default=0)
    bad = min((tokens for tokens, it_ran in ran.items() if not it_ran), default=0)
    tokens = (good + bad) / 2 if good and bad else 1.1 * good or 0.9 * bad
    rounded = max(step, int(tokens // step) * step)
    return None if rounded in ran else rounded
