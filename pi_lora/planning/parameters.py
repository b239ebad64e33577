"""How many numbers a method trains, and in how many bytes it keeps each."""

from dataclasses import dataclass

from pi_lora.planning.shape import Shape
from pi_lora.recipe.schema import Tuning

FLOAT32, BFLOAT16 = 4, 2
# Bytes a weight in NF4 with double quantization (Dettmers et al. 2023, section 3): 4 bits, an 8-bit scale for each 64
# weights, and a float32 scale for each 256 of those: 0.5 + 1/64 + 4/(64 * 256) bytes, or 4.127 bits.
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
# AdamW's two moments have the precision of what they are of; bitsandbytes' take a byte each, and a float32 scale for
# each 256. Paged ones may leave the device when it is full, which is not counted on.
ADAMW_MOMENTS = 2
ADAMW_8BIT = 2 * (1 + 4 / 256)


@dataclass(frozen=True)
class Parameters:
    """Numbers in a model under tuning: those of the base, those that train, and what trains beside a frozen base."""

    base: int
    trained: int
    adapter: int
    copies: int

    @property
    def beside_the_base(self) -> int:
        """LoRA's matrices, and the copies of embeddings and norms."""
        return self.adapter + self.copies


def count_parameters(shape: Shape, tuning: Tuning) -> Parameters:
    """Count as PEFT 0.21 trains them: LoRA on `targets`, never on the head; tied embeddings are copied once."""
    if tuning.method == "full":
        return Parameters(shape.parameters, shape.parameters, 0, 0)
    adapter = shape.layers * sum(
        tuning.rank * (linear.inputs + linear.outputs) + (linear.outputs if tuning.dora else 0)
        for linear in shape.linears
        if linear.in_attention or tuning.targets == "all-linear"
    )
    copies = shape.embedding + shape.all_norm_weights if tuning.embeddings_and_norms else 0
    return Parameters(shape.parameters, adapter + copies, adapter, copies)


def base_bytes(shape: Shape, quantized: bool, bytes_a_number: int) -> int:
    """Of the base's weights as they are loaded; NF4 leaves embeddings, head, norms and biases as they are."""
    if not quantized:
        return shape.parameters * bytes_a_number
    linear = shape.layers * shape.linear_weights
    return round(linear * NF4 + (shape.parameters - linear) * bytes_a_number)


def head_trains(shape: Shape, tuning: Tuning) -> bool:
    """Whether the head gets a gradient: in a full tuning, and where it is the trained embedding itself."""
    return tuning.method == "full" or (shape.tied and tuning.embeddings_and_norms)
