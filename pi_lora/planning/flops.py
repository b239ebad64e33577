"""Parameters that train, and the operations of a training, from the shape of the model."""

from typing import NamedTuple

from pi_lora.errors import RecipeError
from pi_lora.models.shape import Shape
from pi_lora.recipe.schema import Training, Tuning


def adapts_experts(shape: Shape, tuning: Tuning) -> bool:
    """Return whether LoRA trains experts: its product is added to their weights, and a token meets the sum."""
    return tuning.method != "full" and tuning.target_modules == "all-linear" and shape.experts > 0


def trains_head(shape: Shape, tuning: Tuning) -> bool:
    """Return whether the head trains: with all weights, or as the embeddings to which it is tied."""
    return tuning.method == "full" or (shape.tied and tuning.with_embeddings)


def linear_adapter_parameters(shape: Shape, tuning: Tuning) -> int:
    """Count the numbers in LoRA's matrices on linear layers as PEFT 0.21 makes them: on target modules, never on the
    head.

    Raise RecipeError if the model has no such layer.
    """
    if tuning.method == "full":
        return 0
    unknown = sorted(tuning.target_names - shape.lora.keys())
    if unknown:
        choices = ", ".join(sorted(shape.lora))
        raise RecipeError([f"tuning.target_modules: {unknown[0]}: no such linear layer; choose from {choices}"])
    return tuning.rank * sum(shape.lora[name] for name in tuning.target_names)


def trained_parameters(shape: Shape, tuning: Tuning) -> int:
    """Count the trained parameters: all weights, or those of LoRA, norms and embeddings, with tied ones once."""
    if tuning.method == "full":
        return shape.parameters
    parameters = linear_adapter_parameters(shape, tuning)
    if adapts_experts(shape, tuning):
        parameters += tuning.rank * shape.expert_lora
    if tuning.with_embeddings:
        parameters += shape.embedding
    if tuning.with_norms:
        parameters += shape.norm_weights
    return parameters


# Queries of a block, on a CPU at most as many as the window has tokens (models/attention.py).
BLOCK = 256
BLOCK_ON_GPU = 1024
# Channels for attention sinks (models/attention.py).
SINK_CHANNELS = 8


class Blocks(NamedTuple):
    """Attention of a layer in blocks of `size` queries, and the pairs of a query and a key that it computes."""

    size: int
    pairs: float


def blocks_of(tokens: int, window: int, on_cpu: bool) -> Blocks:
    """Return the blocks of a layer with a window, or 0 for none: a block of queries meets whole blocks of keys."""
    size = BLOCK if on_cpu else BLOCK_ON_GPU
    if not 0 < window < tokens:
        return Blocks(size, tokens * (tokens + size) / 2)
    if on_cpu:
        size = min(size, window)
    before = -(-(window - 1) // size)
    # The first blocks have fewer blocks before them.
    missing = before * (before + 1) / 2 * size * size
    return Blocks(size, tokens * size * (1 + before) - missing)


def flops_of_forward(shape: Shape, tokens: int, *, on_cpu: bool) -> float:
    """Return the operations of a forward pass over an input of `tokens` with the default kernel, without the head."""
    layers = (shape.linear_weights + shape.active_experts) * 2.0 * tokens
    return layers + _attention_products(shape, tokens, "auto", on_cpu)


class Flops(NamedTuple):
    """Operations of each part of training."""

    forward: float
    recomputation: float
    backward: float


def flops_of_training(
    shape: Shape, tuning: Tuning, training: Training, tokens: int, *, loss_in_place: bool, attention: str = "auto"
) -> Flops:
    """Return the operations of a whole training on sequences of `tokens`, with a kernel by its name in a recipe.

    A product with a weight costs 2 operations per token. Its backward pass costs 2 for the gradient of the input, and 2
    for the gradient of a weight that trains, or of an expert to which LoRA's product is added. The two products of
    attention are causal: 2 x 2 operations per channel for each pair of tokens that a kernel computes. Checkpointed
    layers are computed again in the backward pass, but for the last product unless an adapter or a norm follows it.
    Computed again are also MLPs in chunks, attention with soft caps, and the logits by TRL's loss, if not in place.
    Left out are the optimizer, norms, softmax, state-space recurrences, and LoRA's product for experts.
    """
    layers = (shape.linear_weights + shape.active_experts) * 2.0 * tokens
    adapter = linear_adapter_parameters(shape, tuning) * 2.0 * tokens
    head = shape.embedding * 2.0 * tokens
    mlp_product = shape.hidden * shape.intermediate * shape.layers * 2.0 * tokens
    products = _attention_products(shape, tokens, attention, on_cpu=loss_in_place)
    forward = layers + adapter + products
    weight_gradients = layers if tuning.method == "full" else adapter
    if trains_head(shape, tuning):
        weight_gradients += head
    if adapts_experts(shape, tuning):
        weight_gradients += shape.active_experts * 2.0 * tokens
    backward = layers + head + adapter + 2 * products + weight_gradients
    chunk = training.mlp_chunk_tokens or tokens
    in_chunks = chunk < tokens
    checkpointed = forward
    if tuning.method == "full" and not in_chunks and shape.norms <= 2:
        checkpointed -= mlp_product
    if training.activation_checkpointing == "selective":
        checkpointed -= products
    checkpointed_share = training.checkpointed_layers(shape.layers) / shape.layers
    recomputation = checkpointed_share * checkpointed
    if in_chunks and not shape.experts:
        repeated = mlp_product * (2 if tuning.method == "full" else 3)
        recomputation += repeated
        if shape.norms <= 2:
            # The recomputation of a checkpointed layer stops before the last chunk.
            recomputation -= repeated * checkpointed_share * (tokens % chunk or chunk) / tokens
    if shape.soft_capped and attention == "auto":
        recomputation += products
    if not loss_in_place:
        recomputation += head
    sequences = training.steps * training.global_batch_size
    return Flops(
        forward=(forward + head) * sequences,
        recomputation=recomputation * sequences,
        backward=backward * sequences,
    )


def _attention_products(shape: Shape, tokens: int, attention: str, on_cpu: bool) -> float:
    """Return the operations of both products of attention over an input, in all layers."""
    width = shape.queries
    if attention == "auto" and shape.in_blocks and not shape.soft_capped:
        width += SINK_CHANNELS * shape.heads
    return 4.0 * _attention_pairs(shape, tokens, attention, on_cpu) * width


def _attention_pairs(shape: Shape, tokens: int, attention: str, on_cpu: bool) -> float:
    """Return the pairs of tokens of a sequence that a kernel computes, over all layers: those in reach of each other,
    with a mask all of them, and in blocks those of the blocks. `eager` has a mask in every layer, `sdpa` where a window
    is shorter than the sequence.
    """
    window = min(shape.sliding_window, tokens)
    full = tokens * tokens / 2
    sliding = window * (tokens - window / 2)
    if attention == "eager":
        full = tokens * tokens
    if attention == "eager" or (attention == "sdpa" and window < tokens):
        sliding = tokens * tokens
    if attention == "auto" and shape.in_blocks:
        full = blocks_of(tokens, 0, on_cpu).pairs
    if attention == "auto" and (shape.in_blocks or window < tokens):
        sliding = blocks_of(tokens, window, on_cpu).pairs
    return shape.full_layers * full + shape.sliding_layers * sliding
