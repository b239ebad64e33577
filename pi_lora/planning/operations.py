"""Floating-point operations of a run, and the hours that they take."""

from dataclasses import dataclass

from pi_lora.planning.parameters import count_parameters
from pi_lora.planning.shape import Shape
from pi_lora.recipe.schema import Tuning

# Assumed: the share of a device's peak that a run reaches, recomputation counted as work. `full` lies between two
# published runs: Qwen3-8B at 1M tokens on 8 H100 (TRL's long-context guide: 380 s per step, 0.45) and LLaMA-7B at 64k
# on 8 A100 (EasyContext: 10,240 tokens/s, 0.50). None is published for LoRA or QLoRA at these lengths: LoRA adds small
# products and casts, QLoRA unpacks every weight three times. The CPU's share gives the demo's 760 steps the five
# minutes that they take on two cores.
ASSUMED_UTILIZATION = {"full": 0.45, "lora": 0.40, "qlora": 0.30}
ASSUMED_UTILIZATION_OF_CPU = 0.38


@dataclass(frozen=True)
class Flops:
    """Operations; a multiplication and an addition count as two."""

    forward: float
    recomputation: float
    backward: float

    @property
    def total(self) -> float:
        """The sum of the three."""
        return self.forward + self.recomputation + self.backward

    def times(self, number: int) -> "Flops":
        """Return the operations of `number` such sequences."""
        return Flops(self.forward * number, self.recomputation * number, self.backward * number)


def flops_of_sequence(shape: Shape, tuning: Tuning, tokens: int, checkpointing: bool) -> Flops:
    """Return the operations of one sequence of `tokens`, forward and backward.

    A product with a weight costs 2 per token forward, 2 backward for its input, and 2 for its own gradient where it
    trains. Attention's two products are causal: half of `tokens` for each token. The chunked loss computes the logits
    again in its backward. Left out: norms, softmax, activation functions, state-space recurrences, the optimizer.
    """
    layers = (shape.linear_weights + shape.active_experts) * 2.0 * tokens
    head = shape.embedding * 2.0 * tokens
    adapter = count_parameters(shape, tuning).adapter * 2.0 * tokens
    attention = _attention(shape, tokens)
    trained = layers + head if tuning.method == "full" else adapter
    return Flops(
        forward=layers + head + adapter + attention,
        recomputation=head + (layers + adapter + attention if checkpointing else 0.0),
        backward=layers + head + adapter + 2 * attention + trained,
    )


def _attention(shape: Shape, tokens: int) -> float:
    """Queries with keys, and weights with values: 2 x 2 operations per channel for each pair of tokens in reach."""
    full, window = tokens * tokens / 2, min(shape.sliding_window, tokens)
    sliding = tokens * window - window * window / 2
    return 4.0 * (shape.full_layers * full + shape.sliding_layers * sliding) * shape.queries
