"""Memory and operations of what a recipe's `evaluation` measures, while it trains and of the finished run; and how many
tokens go through a model at a time, which the measurements read here. Benchmarks are left out: how long their examples
are is not known.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pi_lora.planning.memory import (
    BFLOAT16,
    FLOAT32,
    OVERHEAD,
    OVERHEAD_ON_CPU,
    DeviceMemory,
    base_bytes,
    unpacked_bytes,
)
from pi_lora.planning.operations import layers_flops
from pi_lora.planning.shape import Shape, trained_parameters
from pi_lora.recipe.evaluation import PasskeyOptions, PerplexityOptions, RulerOptions, default_windows
from pi_lora.recipe.schema import Recipe, Tuning

# Tokens that keep the hardware busy in a forward pass, and stay in a processor's caches.
PASS_TOKENS, PASS_TOKENS_ON_CPU = 16384, 2048
# Tokens, shared ones included, of the inputs that go through a model together: what bounds the memory of their keys.
HELD_TOKENS = 16384
# Logits in memory at a time; a window of 32k tokens over a vocabulary of 128k has 4 billion. Each takes two bytes, or
# four, four as float32, and four as logarithm of a probability.
LOGITS, LOGITS_ON_CPU = 2**28, 2**25
LOGIT = BFLOAT16 + 2 * FLOAT32
# Tasks of RULER in lm-eval, and tokens that each writes at the most.
RULER_TASKS, WRITTEN = 13, 128
# Assumed: a step of decoding takes as long as computing with so many tokens. It reads every weight, of two bytes; an
# H100 makes 295 operations while it reads a byte.
DECODED, DECODED_ON_CPU = 256, 32
# Documents of the sources whose texts are known, and tokens of each: the test split of PG-19 has 6,966,499 words (Rae
# et al. 2019, table 1), at four tokens for three words (assumed); those of proof-pile are cut to 32768.
DOCUMENTS = {"pg19": (100, 93_000), "proof-pile": (128, 32768)}


class Measuring(NamedTuple):
    """What measuring takes: bytes on each device at the highest moment, and beside them those of the prefix that
    passkey prompts share, where they can; operations of the process with most to do, over all `times`, if known.
    """

    highest: int
    prefix: int
    flops: float | None
    times: int
    on_cpu: bool

    @property
    def peak(self) -> int:
        """What the device must have: the highest moment, and the overhead."""
        return self.highest + (OVERHEAD_ON_CPU if self.on_cpu else OVERHEAD)

    def beside(self, other: "Measuring") -> "Measuring":
        """Return what takes the one after the other."""
        known = self.flops is not None and other.flops is not None
        flops = (self.flops or 0) + (other.flops or 0) if known else None
        highest, prefix = max(self.highest, other.highest), max(self.prefix, other.prefix)
        return Measuring(highest, prefix, flops, self.times, self.on_cpu)


def passes(length: int, windows: Sequence[int], stride: int) -> Iterator[tuple[int, int]]:
    """Yield how many forward passes a sweep of `windows` takes over a document of `length` tokens, and their tokens."""
    yield 1, min(max(windows), length)
    done = 0
    for window in sorted(windows, reverse=True):
        # Starts, in strides, of the last window that scores a token, and of the last one that is whole.
        last = max(done, (length - max(window - stride, 1) - 1) // stride)
        whole = min(last, max(done, (length - window) // stride))
        yield whole - done, window
        yield from ((1, length - start * stride) for start in range(whole + 1, last + 1))
        done = last


def prompts_at_once(window: int) -> int:
    """Return how many prompts of RULER are continued together by default."""
    return max(1, HELD_TOKENS // window)


def while_training(shape: Shape, recipe: Recipe, window: int, memory: DeviceMemory, on_cpu: bool) -> Measuring | None:
    """Return what measuring a model that trains takes, for a model that reads `window` tokens; None if it is not.

    Weights and optimizer stay where they are. Each process measures its part; a sharded model shares no prefix.
    """
    asked = recipe.evaluation.in_short()
    if not asked.every or not (asked.perplexity or asked.passkey):
        return None
    sharded = recipe.sharded and recipe.hardware.processes > 1
    every, steps = asked.every, recipe.training.steps
    share = min(1.0, (recipe.training.mlp_chunk_tokens or window) / window)
    processes = recipe.hardware.processes
    work = _Work(shape, recipe.tuning, window, memory.in_float32, sharded, on_cpu, processes, share)
    return work.measuring(asked.perplexity, asked.passkey, memory.between, 1 + -(-steps // every))


def afterwards(shape: Shape, recipe: Recipe, original: int, window: int, on_cpu: bool) -> Measuring | None:
    """Return what `pi-lora eval all` takes on one device, or `pi-lora eval summarization` of a run that was tuned on
    examples; None if the recipe asks for neither. Both windows are in tokens.
    """
    asked, tuning = recipe.evaluation, recipe.tuning
    if not asked.perplexity and not asked.passkey and not asked.ruler:
        return None
    beside = 0 if tuning.method == "full" else trained_parameters(shape, tuning) * FLOAT32
    weights = base_bytes(shape, tuning.method == "qlora", FLOAT32 if on_cpu else BFLOAT16) + beside
    work = _Work(shape, tuning, window, wide=on_cpu, sharded=False, on_cpu=on_cpu, processes=1)
    found = work.measuring(asked.perplexity, asked.passkey, weights, 1)
    if asked.ruler:
        found = found.beside(work.ruler(asked.ruler, original, weights))
    if not recipe.data.has_examples:
        return found
    # One summary at a time is the least; on a GPU the library takes what is free for more of them.
    writing = weights + recipe.context.target * work.cache + work.passing(PASS_TOKENS)
    return found._replace(highest=max(found.highest, writing))


class _Work(NamedTuple):
    """A model that is measured in `processes`, of which each computes whole inputs: in float32 if `wide`."""

    shape: Shape
    tuning: Tuning
    window: int
    wide: bool
    sharded: bool
    on_cpu: bool
    processes: int
    mlp_share: float = 1.0

    def measuring(
        self, perplexity: PerplexityOptions | None, passkey: PasskeyOptions | None, resident: int, times: int
    ) -> Measuring:
        """Return what two measurements take beside `resident` bytes."""
        highest, prefix = 0, 0
        flops: list[float | None] = []
        if perplexity:
            windows, stride = perplexity.sweep(self.window)
            tokens = self.at_once(max(windows)) * max(windows)
            most = LOGITS_ON_CPU if self.on_cpu else LOGITS
            logits = min(most, tokens * self.shape.vocabulary) * LOGIT
            highest = self.passing(tokens) + logits
            flops.append(self.sweep_flops(perplexity, windows, stride))
        if passkey:
            target = passkey.target or self.window
            highest = max(highest, self.passing(self.at_once(target) * target))
            # The prefix, and the keys and values of as many tokens again, which are those of the farthest keys.
            prefix = 0 if self.sharded or self.shape.sliding_layers else 2 * target * self.cache
            flops.append(self.passkey_flops(passkey, target))
        known = None if None in flops else sum(each for each in flops if each is not None) * times
        return Measuring(resident + highest, prefix, known, times, self.on_cpu)

    def ruler(self, asked: RulerOptions, original: int, resident: int) -> Measuring:
        """Return what RULER takes beside `resident` bytes: whole prompts with their keys and values, and where several
        are padded to one length, the mask of the shorter ones, of which attention takes a copy as numbers.
        """
        number = FLOAT32 if self.wide else BFLOAT16
        highest, flops = 0, 0.0
        for window in asked.windows or default_windows(self.window, original):
            size = min(asked.batch_size or prompts_at_once(window), asked.samples)
            mask = size * window**2 * (1 + number) if size > 1 else 0
            highest = max(highest, self.passing(size * window) + size * window * self.cache + mask)
            prompts = len(asked.tasks or range(RULER_TASKS)) * asked.samples
            step = self.flops(DECODED_ON_CPU if self.on_cpu else DECODED, size)
            flops += prompts * self.flops(window, 1) + -(-prompts // size) * WRITTEN * step
        return Measuring(resident + highest, 0, flops, 1, self.on_cpu)

    def at_once(self, width: int) -> int:
        """Inputs of `width` tokens in a forward pass."""
        return max(1, (PASS_TOKENS_ON_CPU if self.on_cpu else PASS_TOKENS) // width)

    @property
    def cache(self) -> int:
        """Bytes of keys and values, per token."""
        layers = self.shape.full_layers + self.shape.sliding_layers
        return 2 * layers * self.shape.keys * (FLOAT32 if self.wide else BFLOAT16)

    def passing(self, tokens: int) -> int:
        """Bytes of a forward pass over `tokens`, without its logits; NF4 unpacks one linear layer at a time."""
        per_token = forward_bytes(self.shape, self.tuning, self.wide, self.sharded, self.mlp_share)
        unpacked = unpacked_bytes(self.shape) if self.tuning.method == "qlora" else 0
        return round(tokens * per_token) + unpacked

    def flops(self, tokens: int, logits: int) -> float:
        """Operations of a forward pass over `tokens` of which `logits` are predicted."""
        return sum(layers_flops(self.shape, self.tuning, tokens)) + 2.0 * self.shape.embedding * logits

    def sweep_flops(self, asked: PerplexityOptions, windows: Sequence[int], stride: int) -> float | None:
        """Operations of the process with most documents; None if their number or lengths are not known."""
        number, tokens = DOCUMENTS.get(asked.data, (asked.documents, asked.truncate))
        if number is None or tokens is None:
            return None
        length = max(min(tokens, asked.truncate or tokens), max(windows))
        each = sum(
            number * self.flops(size, min(size, stride * len(windows)))
            for number, size in passes(length, windows, stride)
        )
        return -(-min(number, asked.documents or number) // self.processes) * each

    def passkey_flops(self, asked: PasskeyOptions, target: int) -> float:
        """Operations of the process with most depths, with every prompt whole."""
        return -(-asked.depths // self.processes) * asked.trials * self.flops(target, 1)


def forward_bytes(shape: Shape, tuning: Tuning, wide: bool, gathered: bool, mlp_share: float = 1.0) -> float:
    """Return bytes per token of a forward pass without gradients at its highest, in attention or in the MLP, which
    takes `mlp_share` of the tokens at a time. LoRA casts its inputs to float32, unless they are that already (`wide`),
    or FSDP2 has `gathered` its weights in bfloat16. Counted as those of `planning.memory`, by
    tests/planning/test_plan_evaluating.py.
    """
    hidden, attention, inside = 4.3, 8.5, 3.0
    if tuning.method != "full" and not gathered:
        if wide:
            attention, inside = (11.5, 6.0) if tuning.dora else (9.5, 4.0)
        else:
            hidden, attention, inside = (6.3, 17.3, 10.0) if tuning.dora else (6.3, 13.3, 6.0)
        if tuning.targets == "attention":
            hidden, inside = 4.3, 3.0
    in_mlp = hidden * shape.hidden + inside * shape.intermediate * mlp_share
    return max(in_mlp, attention * max(shape.hidden, shape.queries)) * (FLOAT32 if wide else BFLOAT16)
