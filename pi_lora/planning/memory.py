"""Memory of one device under a recipe, by component and at the moment of a training step when it is highest.

The coefficients of activations were counted by running one layer of transformers 5.23 and PEFT 0.21 under a dispatch
mode that follows every allocation (torch 2.13); tests/planning/test_plan_memory.py counts them again. They are those of
attention with a gated MLP; other layers are taken for one of their widths.

Left out: fragmentation of the allocator, sequences shorter than the longest, what saving needs on top; and what is
below one percent: the log-sum-exp of attention, the norms' inverse deviations, cosines and sines.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pi_lora.planning.gpus import GIB
from pi_lora.planning.shape import Shape, trained_parameters
from pi_lora.recipe.schema import Recipe, Tuning

FLOAT32, BFLOAT16 = 4, 2
# Bytes per weight in NF4 with double quantization (Dettmers et al. 2023, section 3): 4 bits, an 8-bit scale for each 64
# weights, and a float32 scale for each 256 of those: 0.5 + 1/64 + 4/(64 * 256) bytes, or 4.127 bits.
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
# Assumed: the device's context, cuBLAS and NCCL workspaces.
OVERHEAD = round(1.5 * GIB)
# Measured (benchmarks/plan_memory.py) on a CPU: the interpreter with its libraries; and what the C library holds of
# freed tensors, per layer, token and hidden number, up to a GiB, since it gives larger tensors back.
OVERHEAD_ON_CPU = round(0.6 * GIB)
FREED_ON_CPU, MOST_FREED = 55, GIB
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits")
# AdamW's two moments have the precision of what they are of; bitsandbytes' take a byte each, and a float32 scale for
# each 256; those of embeddings stay in 32 bits (transformers 5.23). Paged ones may leave a full device, which is not
# counted on.
ADAMW_MOMENTS = 2
ADAMW_8BIT = 2 * (1 + 4 / 256)
# Bytes per pair of tokens and head: softmax in float32 and its bfloat16 copy, and one more of each in the backward.
EAGER_SCORE = 12
# The chunked loss of TRL 1.16 works on tiles of the logits (trl/kernels/chunked_logprob.py, trl/trainer/utils.py).
LOSS_TILE_TOKENS, LOSS_TILE_VOCABULARY = 4096, 32768
# Its kernels fuse what they do to a tile; without Triton, as on a CPU, the backward holds seven float32 tensors of the
# tile's size and a mask of bytes beside it.
LOSS_TILE_UNFUSED = 7 * FLOAT32 + 1
# Running maximum, sums, target logit and the like, in float32 per token (the same file).
LOSS_STATISTICS = 12
# With offloading, saved inputs on the device at once: one on its way out, one in use, two on their way in
# (measured in TRL's long-context guide: "only 4 are ever resident at once").
RESIDENT_WHEN_OFFLOADED = 4
# Logits that a measurement has at a time (evaluation/perplexity/losses.py), in bfloat16 and twice in float32.
MEASURED_LOGITS, MEASURED_LOGITS_ON_CPU = 10 * 2**28, 10 * 2**25


class _Layer(NamedTuple):
    """What a layer keeps for its backward, and has at the peak of its recomputation and backward, in tensors of
    bfloat16: a float32 one counts as two.

    The pairs count tensors of the hidden and of the intermediate width; `queries` and `keys` are kept throughout.
    `chunked` counts hidden widths kept and at the peak where the MLP runs in chunks, without the MLP's own tensors.
    """

    kept: tuple[float, float]
    peak: tuple[float, float]
    queries: float
    keys: float
    chunked: tuple[float, float]


# bfloat16: of weights and hidden states; autocast: bfloat16 from float32 weights and hidden states; float32: of both;
# casts: PEFT's, from a bfloat16 base to its float32 adapter, where no autocast does that, or dropout forbids it.
Arithmetic = Literal["bfloat16", "autocast", "float32", "casts"]
# Those of LoRA and DoRA have frozen norms, whose input is kept as float32; those that train keep the normalized values
# as well. Attention keeps q, k, v and its output, the MLP four tensors of its width, linear layers that train their
# inputs, for each a cast of its own under autocast; the backward of the MLP adds two or three. DoRA multiplies with the
# base's weights a second time and keeps every product. A chunked MLP keeps its input alone; the peak then is in the
# backward of the norm before it.
_LAYERS: Mapping[str, Mapping[Arithmetic, _Layer]] = {
    "full": {
        "bfloat16": _Layer((8, 4), (10, 6), 2, 2, chunked=(8, 11)),
        "autocast": _Layer((11, 4), (13, 6), 2, 2, chunked=(11, 16)),
        "float32": _Layer((10, 8), (14, 12), 4, 4, chunked=(10, 16)),
    },
    "all-linear": {
        "bfloat16": _Layer((6, 4), (8, 6), 2, 2, chunked=(6, 18)),
        "autocast": _Layer((7, 4), (9, 6), 2, 2, chunked=(7, 15)),
        "float32": _Layer((6, 8), (10, 12), 4, 4, chunked=(6, 20)),
        "casts": _Layer((14, 5), (20, 6.75), 4, 2, chunked=(11, 23)),
    },
    "attention": {
        "bfloat16": _Layer((5, 3), (7, 6), 2, 2, chunked=(6, 18)),
        "autocast": _Layer((5, 3), (7, 6), 2, 2, chunked=(7, 15)),
        "float32": _Layer((4, 6), (8, 12), 4, 4, chunked=(6, 20)),
        "casts": _Layer((10, 3), (12, 6), 4, 2, chunked=(11, 23)),
    },
    "dora": {
        "bfloat16": _Layer((13, 8), (19, 11.5), 5, 6, chunked=(10, 13)),
        "autocast": _Layer((12, 8), (19, 11.5), 4, 6, chunked=(10, 15)),
        "float32": _Layer((14, 16), (14, 18), 8, 12, chunked=(10, 16)),
        "casts": _Layer((20, 11), (21, 14), 7, 8, chunked=(14, 18)),
    },
}
# LoRA on experts adds its product to their weights: bytes per number of one layer's experts, kept and at the peak.
_ADAPTED_EXPERTS = (2.0, 2.7)
# Hidden widths of a chunk, at the least: LoRA on the MLP keeps in it what the rows count outside of it.
_ADAPTED_CHUNK = {"full": 0, "attention": 0, "all-linear": 12, "dora": 0}
# During the backward of a chunked MLP: the gradients of its output, its input and the residual stream.
_AROUND_CHUNKS = 3


class DeviceMemory(NamedTuple):
    """Bytes on one device: the most of each component, and of their sum, which need not coincide; the most while a
    model that trains is measured, 0 if it is not; `overhead` of the process; and of its host: what each device pins
    there, and what the first process takes to load the weights.
    """

    components: Mapping[str, int]
    highest: int
    measuring: int
    overhead: int
    host: int
    loading: int

    @property
    def peak(self) -> int:
        """What the device must have: the highest sum, and the overhead."""
        return max(self.highest, self.measuring) + self.overhead


def memory(
    shape: Shape, recipe: Recipe, original: int, on_cpu: bool = False, has_bfloat16: bool = True
) -> DeviceMemory:
    """Return bytes on one device over a training step of a model whose own window has `original` tokens. A GPU that has
    no bfloat16 computes in float32.

    Four moments are compared: the loss, the backward through the last layer (every saved input is still there), through
    the first (every gradient already is), and the optimizer's step.
    """
    training, tuning, hardware = recipe.training, recipe.tuning, recipe.hardware
    length, full = sequence_length(recipe, original), tuning.method == "full"
    # What one device holds in a forward pass.
    tokens = training.per_device_batch_size * -(-length // hardware.context_parallel)
    base_number = FLOAT32 if recipe.dtype_of_base(on_cpu, has_bfloat16) == "float32" else BFLOAT16
    # FSDP2 shards the weights of a full or LoRA run over all GPUs; NF4 weights and CPUs hold plain copies.
    shards = hardware.processes if recipe.sharded else 1
    in_bfloat16 = recipe.computes_in_bfloat16(has_bfloat16)
    arithmetic = _arithmetic(tuning, in_bfloat16, base_number == FLOAT32, gathered=shards > 1)
    # The base itself trains in its own precision; what trains beside it is float32 (rule 4 of docs/design.md).
    trained, trained_number = trained_parameters(shape, tuning), base_number if full else FLOAT32
    moments = float(trained * ADAMW_MOMENTS * trained_number)
    if training.optimizer == "paged_adamw_8bit":
        in_32_bits = shape.embedding if full or tuning.with_embeddings else 0
        moments = in_32_bits * ADAMW_MOMENTS * FLOAT32 + (trained - in_32_bits) * ADAMW_8BIT
    optimizer = round(moments / shards)
    base = base_bytes(shape, tuning.method == "qlora", base_number)
    weights = (base + (0 if full else trained * FLOAT32)) // shards
    gradients = trained * trained_number // shards
    if shards > 1:
        # FSDP2 gathers in bfloat16 the layer at work, the next one, and the head (accelerate 1.15); two layers'
        # gradients are whole before they are scattered.
        weights += (2 * shape.layer + shape.embedding) * BFLOAT16
        gradients += 2 * shape.layer * BFLOAT16 if full else 0
    # DistributedDataParallel's buckets, which stay when gradients go.
    buckets = gradients if shards == 1 and hardware.processes > 1 else 0
    gradients += buckets
    kept, working = _activations(shape, recipe, length, tokens, arithmetic)
    logits = loss_bytes(shape, tuning, tokens, arithmetic, on_cpu)
    # Autocast keeps bfloat16 copies of float32 weights for the backward; with checkpointing those that train alone, and
    # until the forward pass ends.
    cast = arithmetic == "autocast" and (full or not training.activation_checkpointing)
    casts = (shape.linear_weights + shape.experts) * BFLOAT16 if cast else 0
    recast = 0 if training.activation_checkpointing else casts
    head_gradient = shape.embedding * trained_number // shards if _head_trains(shape, tuning) else 0
    accumulates = training.global_batch_size > training.per_device_batch_size * hardware.data_parallel
    at_moments = (
        (weights + casts, gradients if accumulates else 0, optimizer, kept, logits),
        (weights + recast, gradients if accumulates else head_gradient, optimizer, kept + working, 0),
        (weights, gradients, optimizer, working + kept // shape.layers, 0),
        (weights, gradients, optimizer, 0, 0),
    )
    measuring = _forward_bytes(shape, recipe, original, on_cpu, arithmetic)
    held = min(MOST_FREED, FREED_ON_CPU * shape.layers * tokens * shape.hidden)
    return DeviceMemory(
        components=dict(zip(COMPONENTS, map(max, zip(*at_moments, strict=True)), strict=True)),
        highest=max(map(sum, at_moments)),
        measuring=weights + optimizer + buckets + measuring if measuring else 0,
        overhead=OVERHEAD_ON_CPU + held if on_cpu else OVERHEAD,
        # Offloading pins host memory for each device.
        host=saved_inputs(shape, tokens) if hardware.offload_activations else 0,
        # NF4 is made on the device, a tensor at a time; a CPU's weights are loaded where they stay.
        loading=0 if on_cpu or tuning.method == "qlora" else base,
    )


def _forward_bytes(shape: Shape, recipe: Recipe, original: int, on_cpu: bool, arithmetic: Arithmetic) -> int:
    """Return bytes of a measurement's forward pass over the whole window, at its highest, in attention or in the MLP of
    one layer; 0 if nothing is measured while the model trains.
    """
    evaluation = recipe.evaluation
    if not evaluation.every or not (evaluation.perplexity or evaluation.passkey):
        return 0
    window = original if recipe.scaling == "keep" else recipe.context.target
    # Per token, of LoRA, which casts its inputs to float32; tests/planning/test_plan_memory.py counts them again.
    attention, hidden, inside = (13.3, 6.3, 6.0) if arithmetic not in ("autocast", "float32") else (19.0, 8.6, 8.0)
    inside *= min(1.0, (recipe.training.mlp_chunk_tokens or window) / window)
    per_token = max(attention * max(shape.hidden, shape.queries), hidden * shape.hidden + inside * shape.intermediate)
    logits = MEASURED_LOGITS_ON_CPU if on_cpu else MEASURED_LOGITS
    logits = min(logits, 10 * window * shape.vocabulary) if evaluation.perplexity else 0
    return round(window * per_token * BFLOAT16) + logits + unpacked_bytes(shape, recipe.tuning)


def _arithmetic(tuning: Tuning, in_bfloat16: bool, wide: bool, gathered: bool) -> Arithmetic:
    """Return how a step computes with float32 weights, if `wide`, or bfloat16 ones; FSDP2 gathers them in the dtype in
    which it computes.
    """
    if wide or gathered:
        return "float32" if not in_bfloat16 else "bfloat16" if gathered else "autocast"
    return "casts" if tuning.method != "full" and (not in_bfloat16 or tuning.dropout) else "bfloat16"


def sequence_length(recipe: Recipe, original: int) -> int:
    """Return the tokens of a training sequence: L', or at most L of them under PoSE (`data.positions: skip`)."""
    return recipe.data.tokens_per_sequence(original, recipe.context.target)


def base_bytes(shape: Shape, quantized: bool, bytes_per_number: int) -> int:
    """Return the bytes of the base's weights as loaded; NF4 applies to linear layers alone, without head or biases."""
    in_nf4 = shape.linear_weights if quantized else 0
    return round(in_nf4 * NF4 + (shape.parameters - in_nf4) * bytes_per_number)


def saved_inputs(shape: Shape, tokens: int, wide_stream: bool = False, offloaded: bool = False) -> int:
    """Return bytes of the layer inputs that checkpointing keeps on the device: layers x tokens x hidden."""
    resident = min(shape.layers, RESIDENT_WHEN_OFFLOADED) if offloaded else shape.layers
    return resident * tokens * shape.hidden * (FLOAT32 if wide_stream else BFLOAT16)


def unpacked_bytes(shape: Shape, tuning: Tuning) -> int:
    """Return bytes of the largest linear layer: NF4 unpacks one at a time to bfloat16."""
    return max(linear.weights for linear in shape.linears) * BFLOAT16 if tuning.method == "qlora" else 0


def loss_bytes(
    shape: Shape, tuning: Tuning, tokens: int, arithmetic: Arithmetic = "bfloat16", on_cpu: bool = False
) -> int:
    """Return bytes of TRL's chunked loss: a tile of logits, the final hidden states with gradient, the head's gradient.

    It never holds `tokens x vocabulary`; gradients of the hidden states and of the head are summed in float32.
    """
    per_logit = (FLOAT32 if arithmetic == "float32" else BFLOAT16) + (LOSS_TILE_UNFUSED if on_cpu else 0)
    tile = min(tokens, LOSS_TILE_TOKENS) * min(shape.vocabulary, LOSS_TILE_VOCABULARY) * per_logit
    stream = FLOAT32 if arithmetic in ("autocast", "float32") else BFLOAT16
    hidden = tokens * shape.hidden * (stream + FLOAT32 + stream)
    head = shape.embedding * FLOAT32 if _head_trains(shape, tuning) else 0
    return tile + hidden + head + tokens * LOSS_STATISTICS * FLOAT32


def _head_trains(shape: Shape, tuning: Tuning) -> bool:
    return tuning.method == "full" or (shape.tied and tuning.with_embeddings)


def _activations(shape: Shape, recipe: Recipe, length: int, tokens: int, arithmetic: Arithmetic) -> tuple[int, int]:
    """Return bytes kept from the forward pass, and bytes at work on top of them inside one layer."""
    training, hardware = recipe.training, recipe.hardware
    mlp_share = min(1.0, (training.mlp_chunk_tokens or tokens) / tokens)
    in_layer = layer_bytes(shape, recipe.tuning, arithmetic, hardware.context_parallel, mlp_share)
    width = 2 if arithmetic == "float32" else 1
    # The `eager` kernel alone materializes the attention weights of a layer.
    eager = training.per_device_batch_size if recipe.model.attention == "eager" else 0
    scores = eager * shape.heads * length**2 * EAGER_SCORE
    adapted = recipe.tuning.method != "full" and recipe.tuning.targets == "all-linear" and shape.all_linear is not None
    experts = shape.experts / shape.layers if adapted else 0
    kept_in_layer, peak_in_layer = (
        per_token * tokens + width * per_expert * experts + scores
        for per_token, per_expert in zip(in_layer, _ADAPTED_EXPERTS, strict=True)
    )
    peak_in_layer += unpacked_bytes(shape, recipe.tuning)
    if training.activation_checkpointing:
        wide_stream = arithmetic in ("autocast", "float32")
        return saved_inputs(shape, tokens, wide_stream, hardware.offload_activations), round(peak_in_layer)
    return round(shape.layers * kept_in_layer), round(peak_in_layer - kept_in_layer)


def layer_bytes(
    shape: Shape, tuning: Tuning, arithmetic: Arithmetic, context_parallel: int = 1, mlp_share: float = 1.0
) -> tuple[float, float]:
    """Return bytes per token of one layer: kept for the backward, and at the peak of its recomputation and backward.

    The peak is in the backward of the MLP, or in that of attention where context parallelism gathers the keys and
    values of the whole sequence. `mlp_share` is the share of the tokens that an MLP takes at a time.
    """
    layer, width = _layer(tuning, arithmetic), 2 if arithmetic == "float32" else 1
    wide_stream = arithmetic in ("autocast", "float32")
    of_attention = _bytes(shape, queries=layer.queries, keys=layer.keys)
    kept, peak = (_bytes(shape, *tensors) + of_attention for tensors in (layer.kept, layer.peak))
    in_attention = _bytes(shape, layer.kept[0]) + of_attention
    if mlp_share < 1:
        kept, chunked_peak = (_bytes(shape, tensors) + of_attention for tensors in layer.chunked)
        in_attention = kept
        chunk = _bytes(shape, max(layer.peak[0] - layer.kept[0], _ADAPTED_CHUNK[_kind(tuning)]), layer.peak[1])
        around = _bytes(shape, _AROUND_CHUNKS) * (2 if wide_stream else 1)
        peak = min(peak, max(chunked_peak, kept + around + mlp_share * chunk))
    # Gradients of q, k and v; the other devices' k and v, and their gradients (torch's all-gather rotation).
    others = 4 * context_parallel if context_parallel > 1 else 0
    in_attention += _bytes(shape, queries=width, keys=width * (2 + others))
    # What norms keep beyond the rows: a norm of q and k a float32 copy, a third or fourth norm of hidden states (Gemma)
    # its float32 values as well, and one that trains beside LoRA the normalized values.
    full, of_heads = tuning.method == "full", 0
    if shape.head_normed:
        of_heads = 3 if full or tuning.with_norms else 2
    normalized = (4 if wide_stream else 2) if tuning.with_norms and not full else 0
    of_norms = _bytes(shape, 4 * max(0, shape.norms - 2) + normalized, 0, of_heads, of_heads)
    return kept + of_norms, max(peak, in_attention) + of_norms


def _layer(tuning: Tuning, arithmetic: Arithmetic) -> _Layer:
    return _LAYERS[_kind(tuning)][arithmetic]


def _kind(tuning: Tuning) -> str:
    return "dora" if tuning.dora else "full" if tuning.method == "full" else tuning.targets


def _bytes(shape: Shape, hidden: float = 0, intermediate: float = 0, queries: float = 0, keys: float = 0) -> float:
    """Return bytes per token of bfloat16 tensors, so many of each of the model's widths."""
    of_mlp = hidden * shape.hidden + intermediate * shape.intermediate
    return (of_mlp + queries * shape.queries + keys * shape.keys) * BFLOAT16
