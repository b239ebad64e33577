"""Floating-point operations of forward and backward passes; a multiplication and an addition count as two."""

from typing import NamedTuple

from pi_lora.planning.shape import Shape, adapter_parameters
from pi_lora.recipe.schema import Tuning


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
