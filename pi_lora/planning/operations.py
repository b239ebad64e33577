"""Floating-point operations of a run; a multiplication and an addition count as two."""

from typing import NamedTuple

from pi_lora.planning.memory import adapter_parameters
from pi_lora.planning.shape import Shape
from pi_lora.recipe.schema import Tuning

# Assumed: the share of a device's peak that a run reaches, recomputation counted as work. `full` lies between two
# published runs: Qwen3-8B at 1M tokens on 8 H100 (TRL's long-context guide: 380 s per step, 0.45) and LLaMA-7B at 64k
# on 8 A100 (EasyContext: 10,240 tokens/s, 0.50). None is published for LoRA or QLoRA at these lengths: LoRA adds small
# products and casts, QLoRA unpacks every weight three times. The CPU's share gives the demo's 760 steps the five
# minutes that they take on two cores.
ASSUMED_UTILIZATION = {"full": 0.45, "lora": 0.40, "qlora": 0.30}
ASSUMED_UTILIZATION_OF_CPU = 0.38


class Flops(NamedTuple):
    """Operations by the part of a training step that they belong to."""

    forward: float
    recomputation: float
    backward: float

    @property
    def total(self) -> float:
        """The sum of the three."""
        return self.forward + self.recomputation + self.backward


def flops_of_sequences(shape: Shape, tuning: Tuning, tokens: int, checkpointing: bool, sequences: int = 1) -> Flops:
    """Return the operations of `sequences` of `tokens` each, forward and backward.

    A product with a weight costs 2 per token forward, 2 backward for its input, and 2 for its own gradient where it
    trains. Attention's two products are causal: half of `tokens` for each token. The chunked loss computes the logits
    again in its backward. Left out: norms, softmax, activation functions, state-space recurrences, the optimizer.
    """
    layers = (shape.linear_weights + shape.active_experts) * 2.0 * tokens
    head = shape.embedding * 2.0 * tokens
    adapter = adapter_parameters(shape, tuning) * 2.0 * tokens
    # 2 x 2 operations per channel for each pair of tokens in reach: queries with keys, and weights with values.
    window = min(shape.sliding_window, tokens)
    full, sliding = tokens * tokens / 2, tokens * window - window * window / 2
    attention = 4.0 * (shape.full_layers * full + shape.sliding_layers * sliding) * shape.queries
    forward = layers + head + adapter + attention
    recomputation = head + (layers + adapter + attention if checkpointing else 0.0)
    trained = layers + head if tuning.method == "full" else adapter
    backward = layers + head + adapter + 2 * attention + trained
    return Flops(forward * sequences, recomputation * sequences, backward * sequences)
