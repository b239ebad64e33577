"""The default amount of a measurement: about the same number of tokens at every window."""

# Tokens of a measurement on a GPU, and on a CPU.
GPU_TOKENS = 2**23
CPU_TOKENS = 2**17
# A probe measures several scalings, and training measures several steps: each takes this share.
SHARE = 8
MAX_DOCUMENTS = 20
MAX_SAMPLES = 100
# Depths and trials of passkeys, beginning with the paper's.
PASSKEYS = ((32, 10), (16, 8), (8, 4), (8, 2), (4, 1))


def budget_of(on_cpu: bool) -> int:
    """Return the tokens that a measurement lets through a model."""
    return CPU_TOKENS if on_cpu else GPU_TOKENS


def affordable(budget: int, tokens: float, most: int) -> int:
    """Return how many inputs of so many tokens a budget holds: at least one, and no more than `most`.

    >>> affordable(2**17, 2**15, most=20), affordable(2**17, 2**20, most=20), affordable(2**17, 2, most=20)
    (4, 1, 20)
    """
    return max(1, min(most, int(budget // tokens)))


def passes_of(longest: int, stride: int, truncate: int) -> float:
    """Return about how many passes of `longest` tokens a document of `truncate` tokens takes: one for the first window,
    one for each `stride` tokens after it, and at the end, where only shorter windows score, a third of them.

    >>> passes_of(8192, 1024, 2 * 8192)
    11.66...
    """
    return 1 + longest / stride / 3 + (truncate - longest) / stride


def truncation_within(budget: int, longest: int, stride: int) -> int:
    """Return how many tokens of a document are measured, a multiple of the `longest` window: as many as let a budget
    hold `MAX_DOCUMENTS`, at least one window.

    >>> truncation_within(2**23, 2**17, 2**14), truncation_within(2**23, 2**13, 2**10)
    (131072, 49152)
    """
    passes = budget / MAX_DOCUMENTS / longest
    further = (passes - passes_of(longest, stride, longest)) * stride
    return longest * max(1, 1 + int(further // longest))


def passkeys_within(budget: int, target: int) -> tuple[int, int]:
    """Return the depths and trials of passkeys in `target` tokens: half of a prompt is read anew on average.

    >>> passkeys_within(2**23, 2**17), passkeys_within(2**17, 2**14), passkeys_within(2**17, 2**10)
    ((16, 8), (8, 2), (16, 8))
    """
    prompts = 2 * budget // target
    fitting = [pair for pair in PASSKEYS if pair[0] * pair[1] <= prompts]
    return fitting[0] if fitting else PASSKEYS[-1]
