"""Floating-point operations of training and measuring; a multiplication and an addition count as two."""

from typing import NamedTuple

from pi_lora.planning.shape import Shape, adapter_parameters
from pi_lora.recipe.evaluation import Evaluation
from pi_lora.recipe.schema import Recipe, Tuning

# Assumed where a recipe does not say it: the documents, and tokens of each, of the test split of PG-19, 100 books of
# 6,966,499 words (Rae et al. 2019, table 1) at four tokens for three words; and the paper's stride.
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
    """Estimate the operations on one device of all that a recipe measures of a model that reads `window` tokens, as
    passes over that window: while it trains, dealt out over the processes, and once more of the finished run. Left out:
    benchmarks, whose examples have unknown lengths, and the text that RULER and summaries generate.
    """
    evaluation = recipe.evaluation
    times = 1 + -(-recipe.training.steps // evaluation.every) if evaluation.every else 0
    while_training = times * _passes(evaluation.in_short(), window) / recipe.hardware.processes
    return (while_training + _passes(evaluation, window)) * sum(layers_flops(shape, recipe.tuning, window))


def _passes(evaluation: Evaluation, window: int) -> int:
    """Count the forward passes over `window` tokens; shorter windows share those of the longest."""
    passes = 0
    if sweep := evaluation.perplexity:
        document = max(window, sweep.truncate or DOCUMENT_TOKENS)
        passes += (sweep.documents or DOCUMENTS) * (1 + (document - window) // (sweep.stride or STRIDE))
    if passkey := evaluation.passkey:
        passes += passkey.depths * passkey.trials
    if ruler := evaluation.ruler:  # of L', L'/2, ...: twice those of L'
        passes += 2 * RULER_TASKS * ruler.samples
    return passes
