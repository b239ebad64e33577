"""How many numbers a method trains, and in how many bytes it keeps each."""

from dataclasses import dataclass

from pi_lora.planning.shape import Shape
from pi_lora.recipe.schema import Tuning

FLOAT32, BFLOAT16 = 4, 2
# Bytes per weight in NF4 with double quantization (Dettmers et al. 2023, section 3): 4 bits, an 8-bit scale for each 64
# weights, and a float32 scale for each 256 of those: 0.5 + 1/64 + 4/(64 * 256) bytes, or 4.127 bits.
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class Parameters:
    """Numbers in a model under tuning: those of the base, LoRA's matrices, and copies that train beside the base."""

    base: int
    trained: int
    adapter: int
    copies: int


def count_parameters(shape: Shape, tuning: Tuning) -> Parameters:
    """Count as PEFT 0.21 trains them: LoRA on `targets`, never on the head; tied embeddings are copied once.

    Left out: LoRA on the weights of experts, which PEFT adds under `all-linear` for some types of mixtures.
    """
    if tuning.method == "full":
        return Parameters(shape.parameters, shape.parameters, 0, 0)
    adapter = sum(
        tuning.rank * (linear.inputs + linear.outputs) + (linear.outputs if tuning.dora else 0)
        for linear in shape.linears
        if linear.in_attention or tuning.targets == "all-linear"
    )
    copies = shape.embedding + shape.norm_weights if tuning.embeddings_and_norms else 0
    return Parameters(shape.parameters, adapter + copies, adapter, copies)


def base_bytes(shape: Shape, quantized: bool, bytes_per_number: int) -> int:
    """Return the bytes of the base's weights as loaded; NF4 applies to linear layers alone, without head or biases."""
    if not quantized:
        return shape.parameters * bytes_per_number
    linear = shape.linear_weights
    return round(linear * NF4 + (shape.parameters - linear) * bytes_per_number)


def head_trains(shape: Shape, tuning: Tuning) -> bool:
    """Return whether the head gets a gradient: in full tuning, and where it is the trained embedding itself."""
    return tuning.method == "full" or (shape.tied and tuning.embeddings_and_norms)
