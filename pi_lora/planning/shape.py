"""The shape of a model, from which a plan is computed, and what of it trains."""

from dataclasses import dataclass
from typing import NamedTuple

from pi_lora.recipe.schema import Tuning


class Linear(NamedTuple):
    """Linear layers of `outputs x inputs` weights each, `number` of them; `in_attention` if LoRA on attention adapts
    them.
    """

    inputs: int
    outputs: int
    in_attention: bool
    number: int

    @property
    def weights(self) -> int:
        """How many one has without the biases: what is quantized, and multiplied with each token."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Shape:
    """A decoder: layers between an embedding and a head, which may share their weights (`tied`).

    `layer` is the number of parameters of the largest layer. `intermediate`, `queries` and `keys` are the widths of
    the widest layer, in numbers per token, and `norms` counts the norms of its hidden states; `head_normed` if
    attention has norms of its own. `linears` are those of all layers. The weights of experts are stored in
    `experts` numbers, of which each token is multiplied with `active_experts`. Of such a mixture `all_linear` is what
    LoRA on all linear layers trains per rank where PEFT adapts others than `linears`, as the experts of some types.
    """

    parameters: int
    layers: int
    layer: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    heads: int
    vocabulary: int
    tied: bool
    linears: tuple[Linear, ...]
    experts: int
    active_experts: int
    norms: int
    norm_weights: int
    head_normed: bool
    full_layers: int
    sliding_layers: int
    sliding_window: int
    all_linear: int | None = None

    @property
    def embedding(self) -> int:
        """Numbers in the embedding matrix; the head has as many, or the same ones if `tied`."""
        return self.vocabulary * self.hidden

    @property
    def linear_weights(self) -> int:
        """Weights of the linear layers of all decoder layers."""
        return sum(linear.number * linear.weights for linear in self.linears)


def adapter_parameters(shape: Shape, tuning: Tuning) -> int:
    """Count LoRA's matrices as PEFT 0.21 makes them: on `targets`, never on the head."""
    if tuning.method == "full":
        return 0
    if tuning.targets == "all-linear" and shape.all_linear is not None:
        return tuning.rank * shape.all_linear
    adapted = [each for each in shape.linears if each.in_attention or tuning.targets == "all-linear"]
    return sum(
        each.number * (tuning.rank * (each.inputs + each.outputs) + (each.outputs if tuning.dora else 0))
        for each in adapted
    )


def trained_parameters(shape: Shape, tuning: Tuning) -> int:
    """Count what trains: all weights, or LoRA's and copies of norms and embeddings, of tied ones once."""
    if tuning.method == "full":
        return shape.parameters
    copies = shape.embedding * tuning.with_embeddings + shape.norm_weights * tuning.with_norms
    return adapter_parameters(shape, tuning) + copies
