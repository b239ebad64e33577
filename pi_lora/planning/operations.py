"""Floating-point operations of training; a multiplication and an addition count as two."""

from typing import NamedTuple

from pi_lora.planning.shape import Shape, adapter_parameters
from pi_lora.recipe.schema import Tuning


class Flops(NamedTuple):
    """Operations of each part of training."""

    forward: float
    recomputation: float
    backward: float


def flops_of_sequences(
    shape: Shape,
    tuning: Tuning,
    tokens: int,
    recomputed: float,
    sequences: int = 1,
    plain_loss: bool = False,
    keeps_attention: bool = False,
) -> Flops:
    """Return the operations of training on `sequences` of `tokens` each, of whose layers the share `recomputed` is
    computed again in the backward pass, without attention if `keeps_attention`. Left out: the optimizer's, norms,
    softmax and state-space recurrences.

    A product with a weight costs 2 per token; backward, 2 for its input, and 2 for its own gradient where it trains.
    Attention's two products are causal: 2 x 2 operations per channel for each pair of tokens in reach. The loss in
    chunks computes the logits again in its backward.
    """
    layers = (shape.linear_weights + shape.active_experts) * 2.0 * tokens
    adapter, head = adapter_parameters(shape, tuning) * 2.0 * tokens, shape.embedding * 2.0 * tokens
    window = min(shape.sliding_window, tokens)
    pairs = shape.full_layers * tokens * tokens / 2 + shape.sliding_layers * window * (tokens - window / 2)
    attention = 4.0 * pairs * shape.queries
    forward = layers + adapter + attention
    trained = layers + head if tuning.method == "full" else adapter
    backward = layers + head + adapter + 2 * attention + trained
    again = forward - attention if keeps_attention else forward
    recomputation = recomputed * again + (0.0 if plain_loss else head)
    return Flops((forward + head) * sequences, recomputation * sequences, backward * sequences)
