"""The shape of a model, from which a plan is computed: parameters that train, and operations."""

from dataclasses import dataclass
from typing import NamedTuple

from pi_lora.errors import RecipeError
from pi_lora.recipe.schema import Training, Tuning


@dataclass(frozen=True)
class Shape:
    """A decoder: layers between an embedding and a head, which may share their weights (`tied`).

    `layer` is the number of parameters of the largest layer. `intermediate`, `queries` and `keys` are the widths of
    the widest layer, in numbers per token, and `norms` counts the norms of its hidden states; `head_normed` if
    attention has norms of its own. `linear_weights` are those of all layers' linear layers without biases: what is
    quantized, and multiplied with each token. `lora` has the numbers of LoRA's matrices per rank by `tuning.target_modules`.
    The weights of experts are stored in `experts` numbers; a token is multiplied with `active_experts` of them.
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
    lora: dict[str, int]
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
    """Count LoRA's matrices as PEFT 0.21 makes them: on `targets`, never on the head. Raise RecipeError if the model
    has no such layer.
    """
    if tuning.method == "full":
        return 0
    if unknown := sorted(tuning.target_names - shape.lora.keys()):
        choices = ", ".join(sorted(shape.lora))
        raise RecipeError([f"tuning.target_modules: {unknown[0]}: no such linear layer; choose from {choices}"])
    return tuning.rank * sum(shape.lora[name] for name in tuning.target_names)


def trained_parameters(shape: Shape, tuning: Tuning) -> int:
    """Count what trains: all weights, or LoRA's and copies of norms and embeddings, of tied ones once."""
    if tuning.method == "full":
        return shape.parameters
    copies = shape.embedding * tuning.with_embeddings + shape.norm_weights * tuning.with_norms
    return adapter_parameters(shape, tuning) + copies


class Flops(NamedTuple):
    """Operations of each part of training."""

    forward: float
    recomputation: float
    backward: float


def flops_of_training(shape: Shape, tuning: Tuning, training: Training, tokens: int, plain_loss: bool) -> Flops:
    """Return the operations of a whole training on sequences of `tokens`; checkpointed layers are computed again in the
    backward pass. Left out: the optimizer's, norms, softmax and state-space recurrences.

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
    again = forward - attention * (training.activation_checkpointing == "selective")
    recomputation = training.checkpointed_layers(shape.layers) / shape.layers * again + head * (not plain_loss)
    sequences = training.steps * training.global_batch_size
    return Flops((forward + head) * sequences, recomputation * sequences, backward * sequences)
