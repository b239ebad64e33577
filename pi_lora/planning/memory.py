"""Memory of one device under a recipe, by component and at the moment of a training step when it is highest.

The coefficients of activations were counted by running one layer of transformers 5.23 and PEFT 0.21 under a dispatch
mode that follows every allocation (torch 2.13); tests/planning/test_plan_memory.py counts them again. They are those of
attention with a gated MLP; other layers are taken for one of their widths.

Left out: fragmentation of the allocator, sequences shorter than the longest, what saving needs on top, evaluation
(`planning.evaluating`); and what is below one percent: the log-sum-exp of attention, the norms' inverse deviations,
cosines and sines.
"""

from collections.abc import Mapping
from typing import NamedTuple

from pi_lora.planning.shape import Shape, trained_parameters
from pi_lora.recipe.schema import Recipe, Tuning

GIB = 2**30
FLOAT32, BFLOAT16 = 4, 2
# Bytes per weight in NF4 with double quantization (Dettmers et al. 2023, section 3): 4 bits, an 8-bit scale for each 64
# weights, and a float32 scale for each 256 of those: 0.5 + 1/64 + 4/(64 * 256) bytes, or 4.127 bits.
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
# Assumed: the device's context, cuBLAS and NCCL workspaces; on a CPU the interpreter with its libraries.
OVERHEAD = round(1.5 * GIB)
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


class _Layer(NamedTuple):
    """How many bfloat16 tensors a layer keeps for its backward, and has at the peak of its recomputation and backward.

    The pairs count tensors of the hidden and of the intermediate width; `queries` and `keys` are kept throughout.
    `chunked` counts hidden widths kept and at the peak where the MLP runs in chunks, without the MLP's own tensors.
    """

    kept: tuple[float, float]
    peak: tuple[float, float]
    queries: float
    keys: float
    chunked: tuple[float, float]


# Two norms keep 3 each (a float32 copy and the normalized values), or 2 when frozen; linear layers their inputs,
# attention q, k, v and its output, the MLP four tensors of its width; the backward of the MLP adds two. Frozen linear
# layers keep no input, LoRA a copy of it for itself. The LoRA rows are those of frozen norms. A chunked MLP keeps
# its input alone; the peak then is in the backward of the float32 norm before it.
_ALL_WEIGHTS = _Layer((8, 4), (11, 6), 2, 2, chunked=(8, 11))
# Autocast over float32 weights: the residual stream is float32, and every linear layer casts its input for itself.
_ALL_WEIGHTS_FLOAT32 = _Layer((11, 4), (13, 6), 2, 2, chunked=(11, 16))
_LORA_ALL = _Layer((9, 4), (15, 7), 3, 2, chunked=(8, 19))
_LORA_ATTENTION = _Layer((7, 3), (10, 6), 3, 2, chunked=(8, 19))
# DoRA multiplies with the base's weights a second time and keeps every product.
_DORA = _Layer((13, 8), (19, 11.5), 5, 6, chunked=(10, 13))
# LoRA on experts adds its product to their weights: bytes per number of one layer's experts, kept and at the peak.
_ADAPTED_EXPERTS = (2.0, 2.7)
# During the backward of a chunked MLP: the gradients of its output, its input and the residual stream.
_AROUND_CHUNKS = 3


class DeviceMemory(NamedTuple):
    """Bytes on one device: the most of each component, and of their sum, which need not coincide; on its host while it
    trains; on the host of the first while the weights are loaded; and on one device `between` two steps, with whether a
    model that is measured then computes in float32.
    """

    components: Mapping[str, int]
    highest: int
    host: int
    loading: int
    between: int
    in_float32: bool

    @property
    def peak(self) -> int:
        """What the device must have: the highest sum, and the overhead."""
        return self.highest + OVERHEAD


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
    if training.precision == "auto" and not has_bfloat16:
        recipe = recipe.model_copy(update={"training": training.model_copy(update={"precision": "float32"})})
        training = recipe.training
    dtype = recipe.model.dtype or ("float32" if full or on_cpu or not has_bfloat16 else "bfloat16")
    base_number = FLOAT32 if dtype == "float32" else BFLOAT16
    # FSDP2 shards the weights of a full or LoRA run over all GPUs; NF4 weights and CPUs hold plain copies.
    shards = hardware.processes if recipe.sharded else 1
    wide_stream = base_number == FLOAT32 and shards == 1
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
    kept, working = _activations(shape, recipe, length, tokens, wide_stream, gathered=shards > 1)
    logits = loss_bytes(shape, tuning, tokens, wide_stream, on_cpu, training.precision == "float32")
    # Autocast keeps bfloat16 copies of float32 weights that train until the forward pass ends.
    cast = full and wide_stream and training.precision != "float32"
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
    most = map(max, zip(*at_moments, strict=True))
    # Offloading pins host memory for each device.
    host = saved_inputs(shape, tokens) if hardware.offload_activations else 0
    # NF4 is made on the device, a tensor at a time; a CPU's weights are loaded where they stay.
    loading = 0 if on_cpu or tuning.method == "qlora" else base
    components = dict(zip(COMPONENTS, most, strict=True))
    in_float32 = wide_stream if shards == 1 else training.precision == "float32"
    between = weights + optimizer + buckets
    return DeviceMemory(components, max(map(sum, at_moments)), host, loading, between, in_float32)


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


def unpacked_bytes(shape: Shape) -> int:
    """Return bytes of the largest linear layer: NF4 unpacks one at a time to bfloat16."""
    return max(linear.weights for linear in shape.linears) * BFLOAT16


def loss_bytes(
    shape: Shape, tuning: Tuning, tokens: int, wide_stream: bool, on_cpu: bool = False, in_float32: bool = False
) -> int:
    """Return bytes of TRL's chunked loss: a tile of logits, the final hidden states with gradient, the head's gradient.

    It never holds `tokens x vocabulary`; gradients of the hidden states and of the head are summed in float32.
    """
    per_logit = (FLOAT32 if in_float32 else BFLOAT16) + (LOSS_TILE_UNFUSED if on_cpu else 0)
    tile = min(tokens, LOSS_TILE_TOKENS) * min(shape.vocabulary, LOSS_TILE_VOCABULARY) * per_logit
    stream = FLOAT32 if wide_stream else BFLOAT16
    hidden = tokens * shape.hidden * (stream + FLOAT32 + stream)
    head = shape.embedding * FLOAT32 if _head_trains(shape, tuning) else 0
    return tile + hidden + head + tokens * LOSS_STATISTICS * FLOAT32


def _head_trains(shape: Shape, tuning: Tuning) -> bool:
    return tuning.method == "full" or (shape.tied and tuning.with_embeddings)


def _activations(
    shape: Shape, recipe: Recipe, length: int, tokens: int, wide_stream: bool, gathered: bool
) -> tuple[int, int]:
    """Return bytes kept from the forward pass, and bytes at work on top of them inside one layer."""
    training, hardware = recipe.training, recipe.hardware
    mlp_share = min(1.0, (training.mlp_chunk_tokens or tokens) / tokens)
    in_layer = layer_bytes(shape, recipe.tuning, wide_stream, gathered, hardware.context_parallel, mlp_share)
    # Float32 arithmetic keeps everything twice as wide.
    width = 2 if training.precision == "float32" else 1
    # The `eager` kernel alone materializes the attention weights of a layer.
    eager = training.per_device_batch_size if recipe.model.attention == "eager" else 0
    scores = eager * shape.heads * length**2 * EAGER_SCORE
    adapted = recipe.tuning.method != "full" and recipe.tuning.targets == "all-linear" and shape.all_linear is not None
    experts = shape.experts / shape.layers if adapted else 0
    kept_in_layer, peak_in_layer = (
        width * (per_token * tokens + per_expert * experts) + scores
        for per_token, per_expert in zip(in_layer, _ADAPTED_EXPERTS, strict=True)
    )
    if recipe.tuning.method == "qlora":
        peak_in_layer += unpacked_bytes(shape)
    if training.activation_checkpointing:
        return saved_inputs(shape, tokens, wide_stream, hardware.offload_activations), round(peak_in_layer)
    return round(shape.layers * kept_in_layer), round(peak_in_layer - kept_in_layer)


def layer_bytes(
    shape: Shape, tuning: Tuning, wide_stream: bool, gathered: bool, context_parallel: int = 1, mlp_share: float = 1.0
) -> tuple[float, float]:
    """Return bytes per token of one layer: kept for the backward, and at the peak of its recomputation and backward.

    `wide_stream` says that hidden states are float32 (float32 weights under autocast); `gathered`, that weights come
    in bfloat16 from FSDP2, where LoRA's inputs need no cast and no copy. The peak is in the backward of the MLP, or in
    that of attention where context parallelism gathers the keys and values of the whole sequence. `mlp_share` is the
    share of the tokens that an MLP takes at a time.
    """
    layer = _layer(tuning, wide_stream, gathered)
    of_attention = _bytes(shape, queries=layer.queries, keys=layer.keys)
    kept, peak = (_bytes(shape, *tensors) + of_attention for tensors in (layer.kept, layer.peak))
    in_attention = _bytes(shape, layer.kept[0]) + of_attention
    if mlp_share < 1:
        kept, chunked_peak = (_bytes(shape, tensors) + of_attention for tensors in layer.chunked)
        in_attention = kept
        chunk = _bytes(shape, layer.peak[0] - layer.kept[0], layer.peak[1])
        around = _bytes(shape, _AROUND_CHUNKS) * (2 if wide_stream else 1)
        peak = min(peak, max(chunked_peak, kept + around + mlp_share * chunk))
    # Gradients of q, k and v; the other devices' k and v, and their gradients (torch's all-gather rotation).
    others = 4 * context_parallel if context_parallel > 1 else 0
    in_attention += _bytes(shape, queries=1, keys=2 + others)
    # What norms keep beyond the rows: a norm of q and k a float32 copy, a third or fourth norm of hidden states (Gemma)
    # its float32 values as well, and one that trains beside LoRA the normalized values.
    full, of_heads = tuning.method == "full", 0
    if shape.head_normed:
        of_heads = 3 if full or tuning.with_norms else 2
    normalized = 2 if tuning.with_norms and not full else 0
    of_norms = _bytes(shape, 4 * max(0, shape.norms - 2) + normalized, 0, of_heads, of_heads)
    return kept + of_norms, max(peak, in_attention) + of_norms


def _layer(tuning: Tuning, wide_stream: bool, gathered: bool) -> _Layer:
    if tuning.method == "full":
        return _ALL_WEIGHTS_FLOAT32 if wide_stream else _ALL_WEIGHTS
    if tuning.dora:
        return _DORA
    if tuning.targets == "attention":
        return _LORA_ATTENTION
    return _ALL_WEIGHTS if gathered else _LORA_ALL


def _bytes(shape: Shape, hidden: float = 0, intermediate: float = 0, queries: float = 0, keys: float = 0) -> float:
    """Return bytes per token of bfloat16 tensors, so many of each of the model's widths."""
    of_mlp = hidden * shape.hidden + intermediate * shape.intermediate
    return (of_mlp + queries * shape.queries + keys * shape.keys) * BFLOAT16
