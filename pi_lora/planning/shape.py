"""The shape of a model, from which a plan is computed, and what of it trains."""

from dataclasses import dataclass
from typing import NamedTuple

from pi_lora.errors import RecipeError
from pi_lora.recipe.schema import Tuning


class Adapted(NamedTuple):
    """What LoRA adapts: numbers that its matrices have per rank, and outputs, each of which DoRA scales."""

    per_rank: int
    outputs: int


@dataclass(frozen=True)
class Shape:
    """A decoder: layers between an embedding and a head, which may share their weights (`tied`).

    `layer` is the number of parameters of the largest layer. `intermediate`, `queries` and `keys` are the widths of
    the widest layer, in numbers per token, and `norms` counts the norms of its hidden states; `head_normed` if
    attention has norms of its own. `linear_weights` are those of all layers' linear layers without biases: what is
    quantized, and multiplied with each token. `lora` has what LoRA adapts by `tuning.targets`. The weights of experts
    are stored in `experts` numbers, of which each token is multiplied with `active_experts`.
    """

    parameters: int
    layers: int
    layer: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool
    linear_weights: int
    lora: dict[str, Adapted]
    experts: int
    active_experts: int
    norms: int
    norm_weights: int
    head_normed: bool
    full_layers: int
    sliding_layers: int
    sliding_window: int

    @property
    def embedding(self) -> int:
        """Numbers in the embedding matrix; the head has as many, or the same ones if `tied`."""
        return self.vocabulary * self.hidden


def adapter_parameters(shape: Shape, tuning: Tuning) -> int:
    """Count LoRA's matrices as PEFT 0.21 makes them: on `targets`, never on the head; raise RecipeError if the model
    has no such layer.
    """
    if tuning.method == "full":
        return 0
    if unknown := sorted(tuning.target_names - shape.lora.keys()):
        choices = ", ".join(sorted(shape.lora))
        raise RecipeError([f"tuning.targets: {unknown[0]}: no such linear layer; choose from {choices}"])
    adapted = [shape.lora[name] for name in tuning.target_names]
    return sum(tuning.rank * each.per_rank + tuning.dora * each.outputs for each in adapted)


def trained_parameters(shape: Shape, tuning: Tuning) -> int:
    """Count what trains: all weights, or LoRA's and copies of norms and embeddings, of tied ones once."""
    if tuning.method == "full":
        return shape.parameters
    copies = shape.embedding * tuning.with_embeddings + shape.norm_weights * tuning.with_norms
    return adapter_parameters(shape, tuning) + copies
