"""Floating-point operations of training and measuring; a multiplication and an addition count as two."""

from typing import NamedTuple

from pi_lora.planning.shape import Shape, adapter_parameters
from pi_lora.recipe.evaluation import Evaluation
from pi_lora.recipe.schema import Recipe, Tuning

# Assumed where a recipe does not say it: the documents, and tokens of each, of the test split of PG-19: 100 books of
# 6,966,499 words (Rae et al. 2019, table 1), at four tokens for three words.
DOCUMENTS, DOCUMENT_TOKENS = 100, 93_000
STRIDE, RULER_TASKS = 256, 13


class Flops(NamedTuple):
    """Operations of each part of training."""

    forward: float
    recomputation: float
    backward: float


def layers_flops(shape: Shape, tuning: Tuning, tokens: int) -> tuple[float, float, float]:
    """Return the operations of a forward pass over `tokens`: of the layers' own weights, of LoRA's, and of attention.

    A product with a weight costs 2 per token. Attention's two products are causal: half of `tokens` for each token.
    Left out: norms, softmax, activation functions, state-space recurrences.
    """
    layers = (shape.linear_weights + shape.active_experts) * 2.0 * tokens
    adapter = adapter_parameters(shape, tuning) * 2.0 * tokens
    # 2 x 2 operations per channel for each pair of tokens in reach: queries with keys, and weights with values.
    window = min(shape.sliding_window, tokens)
    full, sliding = tokens * tokens / 2, tokens * window - window * window / 2
    return layers, adapter, 4.0 * (shape.full_layers * full + shape.sliding_layers * sliding) * shape.queries


def flops_of_sequences(shape: Shape, tuning: Tuning, tokens: int, checkpointing: bool, sequences: int = 1) -> Flops:
    """Return the operations of training on `sequences` of `tokens` each, without the optimizer's.

    Backward, a product with a weight costs 2 per token for its input, and 2 for its own gradient where it trains. The
    chunked loss computes the logits again in its backward.
    """
    layers, adapter, attention = layers_flops(shape, tuning, tokens)
    head = shape.embedding * 2.0 * tokens
    forward = layers + head + adapter + attention
    recomputation = head + (layers + adapter + attention if checkpointing else 0.0)
    trained = layers + head if tuning.method == "full" else adapter
    backward = layers + head + adapter + 2 * attention + trained
    return Flops(forward * sequences, recomputation * sequences, backward * sequences)


def measuring_flops(shape: Shape, recipe: Recipe, window: int) -> float:
    """Estimate the operations on one device of all that a recipe measures of a model that reads `window` tokens: while
    it trains, dealt out over the processes, and once more of the finished run. Left out: benchmarks, whose examples
    have unknown lengths, and the text that RULER and summaries generate.
    """
    evaluation = recipe.evaluation
    times = 1 + -(-recipe.training.steps // evaluation.every) if evaluation.every else 0
    while_training = times * _forward_flops(shape, recipe.tuning, evaluation.in_short(), window)
    finished = _forward_flops(shape, recipe.tuning, evaluation, window)
    return while_training / recipe.hardware.processes + finished


def _forward_flops(shape: Shape, tuning: Tuning, evaluation: Evaluation, window: int) -> float:
    """Return the operations of the forward passes of one evaluation. Shorter windows share those of the longest."""
    passes: list[tuple[float, int]] = []  # their number and tokens
    if asked := evaluation.perplexity:
        longest = max(asked.windows or [window])
        stride = asked.stride or min(STRIDE, longest)
        document = max(longest, asked.truncate or DOCUMENT_TOKENS)
        passes.append(((asked.documents or DOCUMENTS) * (1 + (document - longest) // stride), longest))
    if passkey := evaluation.passkey:
        passes.append((passkey.depths * passkey.trials, passkey.target or window))
    if ruler := evaluation.ruler:
        prompts = len(ruler.tasks or range(RULER_TASKS)) * ruler.samples
        passes += [(prompts, length) for length in ruler.windows or [window, window // 2]]
    return sum(number * sum(layers_flops(shape, tuning, tokens)) for number, tokens in passes)
