"""Memory of one device under a recipe, by component and at the moment of a training step when it is highest.

The coefficients of activations were counted by running one layer of transformers 5.23 and PEFT 0.21 under a dispatch
mode that follows every allocation (torch 2.13); tests/planning/test_plan_memory.py counts them again. They are those of
attention with a gated MLP; other layers are taken for one of their widths.

Left out: fragmentation of the allocator, sequences shorter than the longest, what saving needs on top, the attention
weights that the `eager` kernel alone makes whole; and what is about one percent or less: the log-sum-exp of attention,
the norms' inverse deviations, cosines and sines, the linear layer that NF4 has unpacked at the moment.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pi_lora.planning.gpus import CPU, GIB, Gpu
from pi_lora.planning.shape import Shape, trained_parameters
from pi_lora.recipe.schema import Recipe, Tuning

FLOAT32, BFLOAT16 = 4, 2
# Bytes per weight in NF4 with double quantization (Dettmers et al. 2023, section 3): 4 bits, an 8-bit scale for each 64
# weights, and a float32 scale for each 256 of those: 0.5 + 1/64 + 4/(64 * 256) bytes, or 4.127 bits.
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
# Assumed: the device's context, cuBLAS and NCCL workspaces.
OVERHEAD = round(1.5 * GIB)
# Measured (benchmarks/plan_memory.py) on a CPU: the interpreter with its libraries; and what the C library holds of
# freed tensors, per layer, token and hidden number, up to a GiB in float32 and half of it in bfloat16, since it gives
# larger tensors back.
OVERHEAD_ON_CPU = round(0.6 * GIB)
FREED_ON_CPU = 55
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits")
# AdamW's two moments have the precision of what they are of; bitsandbytes' take a byte each, and a float32 scale for
# each 256; those of embeddings stay in 32 bits (transformers 5.23). Paged ones may leave a full device, which is not
# counted on.
ADAMW_MOMENTS = 2
ADAMW_8BIT = 2 * (1 + 4 / 256)
# The chunked loss of TRL 1.16 works on tiles of the logits (trl/kernels/chunked_logprob.py, trl/trainer/utils.py).
LOSS_TILE_TOKENS, LOSS_TILE_VOCABULARY = 4096, 32768
# Its kernels fuse what they do to a tile; without Triton, as on a CPU, the backward holds seven float32 tensors of the
# tile's size and a mask of bytes.
LOSS_TILE_UNFUSED = 7 * FLOAT32 + 1
# With offloading, saved inputs on the device at once: one on its way out, one in use, two on their way in
# (measured in TRL's long-context guide: "only 4 are ever resident at once").
RESIDENT_WHEN_OFFLOADED = 4
# The plain loss has all logits in float32 at its peak, as log-probabilities and twice as gradients (torch 2.13).
PLAIN_LOSS = 3 * FLOAT32
# How far a measured peak may lie above the planned one; room is what is left beyond it.
MARGIN = 1.15
# Logits that a measurement holds at a time, in bfloat16 and twice in float32 (evaluation/forward.py).
MEASURED_LOGITS, MEASURED_LOGITS_ON_CPU = 10 * 2**28, 10 * 2**25


# bfloat16: of weights and hidden states; autocast: bfloat16 from float32 weights and hidden states; float32: of both;
# casts: PEFT's, from a bfloat16 base to its float32 adapter, where no autocast does that, or dropout forbids it.
Arithmetic = Literal["bfloat16", "autocast", "float32", "casts"]
WIDE_STREAM = ("autocast", "float32")
# What a layer keeps for its backward outside attention, in tensors of bfloat16 of the hidden and of the intermediate
# width: a float32 one counts as two. The MLP keeps four tensors of its width; linear layers that train keep their
# inputs, for each a cast of its own under autocast. LoRA's frozen norms keep their input as float32. LoRA on attention
# alone takes up to a fifth less.
_FULL = {"bfloat16": (8, 4), "autocast": (11, 4), "float32": (10, 8)}
_LORA = {"bfloat16": (6, 4), "autocast": (7, 4), "float32": (6, 8), "casts": (16, 5)}
# What the backward of the MLP adds.
_BACKWARD = {"bfloat16": (2, 2), "autocast": (2, 2), "float32": (4, 4), "casts": (6, 1.75)}
# LoRA on experts adds its product to their weights: bytes per number of one layer's experts at the peak; 2.0 of them
# are kept.
ADAPTED_EXPERTS = 2.7
# Hidden widths at the peak of a chunked MLP, beyond those that are kept and those of a chunk; full tuning takes 8.
_AROUND_CHUNKS = 12


class DeviceMemory(NamedTuple):
    """Bytes on one device: the most of each component, and of their sum, which need not coincide; the `peak`, which has
    the process on top; and `host`, what the device pins in the memory of its host. `plain_loss`: whether the loss is
    the model's own, from all logits at once, and not TRL's in chunks, which computes them twice.
    """

    components: Mapping[str, int]
    highest: int
    peak: int
    host: int
    plain_loss: bool


def memory(shape: Shape, recipe: Recipe, original: int, gpu: Gpu) -> DeviceMemory:
    """Return bytes on one device over a training step of a model whose own window has `original` tokens.

    These moments are compared: the loss, the backward through the last layer (every saved input is still there) and
    through the first (every gradient already is), and measuring between two steps.
    """
    training, tuning, hardware = recipe.training, recipe.tuning, recipe.hardware
    on_cpu, full = gpu.name == CPU, tuning.method == "full"
    length = recipe.data.tokens_per_sequence(original, recipe.context.target)
    # Of a forward pass on one device.
    tokens = training.per_device_batch_size * length // hardware.context_parallel
    # FSDP2 shards the weights of a full or LoRA run over all GPUs; NF4 weights and CPUs hold plain copies.
    shards = hardware.processes if recipe.sharded else 1
    number = FLOAT32 if recipe.dtype_of_base(on_cpu, gpu.bfloat16) == "float32" else BFLOAT16
    arithmetic = _arithmetic(recipe, gpu, number == FLOAT32, gathered=shards > 1)
    weights, gradients, optimizer = _states(shape, recipe, number, shards)
    # DistributedDataParallel's buckets, which stay when gradients go.
    buckets = gradients if shards == 1 and hardware.processes > 1 else 0
    gradients += buckets
    # Autocast keeps bfloat16 copies of float32 weights for the backward; of layers that are checkpointed, those that
    # train alone, and until the forward pass ends.
    casts = (shape.linear_weights + shape.experts) * BFLOAT16 if arithmetic == "autocast" else 0
    casts_of_kept = casts * (shape.layers - training.checkpointed_layers(shape.layers)) // shape.layers
    accumulated = gradients if training.global_batch_size > recipe.sequences_at_once else 0
    of_head = shape.embedding * FLOAT32 * (full or (shape.tied and tuning.with_embeddings))
    kept, working = _activations(shape, recipe, tokens, arithmetic)
    at_moments = [
        (weights + casts_of_kept, accumulated or of_head // shards, optimizer, kept + working, 0),
        (weights, gradients, optimizer, working + kept // shape.layers, 0),
    ]
    if recipe.evaluation.every:
        # Without activations and gradients; a layer takes no more than at the peak of its backward.
        forward = round(max(original, recipe.context.target) * layer_bytes(shape, tuning, arithmetic)[1])
        logits = MEASURED_LOGITS_ON_CPU if on_cpu else MEASURED_LOGITS
        at_moments.append((weights, buckets, optimizer, forward, logits))
    freed = FREED_ON_CPU * shape.layers * tokens * shape.hidden
    most = GIB >> (arithmetic != "float32")
    overhead = OVERHEAD_ON_CPU + min(most, freed) if on_cpu else OVERHEAD
    before_loss = (weights + (casts if full else casts_of_kept), accumulated, optimizer, kept)
    plain, chunked = loss_bytes(shape, tokens, arithmetic, on_cpu)
    # On a GPU, reading float32 logits takes longer than computing them twice. TRL's loss alone balances experts over
    # accumulated batches.
    plain_loss = on_cpu and not shape.experts and (sum(before_loss) + plain + overhead) * MARGIN <= gpu.memory
    at_moments.append((*before_loss, of_head + (plain if plain_loss else chunked)))
    highest = max(map(sum, at_moments))
    # Each pinned tensor takes a power of two (torch 2.13).
    pinned = shape.layers * 2 ** (hidden_states(shape, tokens, arithmetic) - 1).bit_length()
    return DeviceMemory(
        components=dict(zip(COMPONENTS, map(max, *at_moments), strict=True)),
        highest=highest,
        peak=highest + overhead,
        host=pinned if hardware.offload_activations else 0,
        plain_loss=plain_loss,
    )


def _arithmetic(recipe: Recipe, gpu: Gpu, wide: bool, gathered: bool) -> Arithmetic:
    """Return how a step computes with float32 weights, if `wide`, or bfloat16 ones; FSDP2 gathers them in the dtype in
    which it computes, float32 on a GPU that has no bfloat16.
    """
    in_bfloat16, tuning = recipe.computes_in(gpu.name == CPU, gpu.bfloat16) != "float32", recipe.tuning
    if wide or gathered:
        return "float32" if not in_bfloat16 else "bfloat16" if gathered else "autocast"
    return "casts" if tuning.method != "full" and (not in_bfloat16 or tuning.dropout) else "bfloat16"


def _states(shape: Shape, recipe: Recipe, number: int, shards: int) -> tuple[int, int, int]:
    """Return bytes on one of `shards` devices of weights, gradients and AdamW's moments; of weights that are not
    quantized, `number` bytes each.
    """
    tuning = recipe.tuning
    full = tuning.method == "full"
    # NF4 applies to linear layers alone, without head or biases.
    in_nf4 = shape.linear_weights if tuning.method == "qlora" else 0
    base = round(in_nf4 * NF4 + (shape.parameters - in_nf4) * number)
    # The base itself trains in its own precision; what an adapter trains is float32 (rule 4 of docs/design.md).
    trained_number = number if full else FLOAT32
    trained = trained_parameters(shape, tuning) * trained_number
    moments = trained * ADAMW_MOMENTS
    if recipe.training.optimizer == "paged_adamw_8bit":
        in_32_bits = shape.embedding * trained_number if full or tuning.with_embeddings else 0
        moments = round(in_32_bits * ADAMW_MOMENTS + (trained - in_32_bits) / trained_number * ADAMW_8BIT)
    weights, gradients = (base + (0 if full else trained)) // shards, trained // shards
    if shards > 1:
        # FSDP2 gathers in bfloat16 the layer at work, the next one, and the head (accelerate 1.15); two layers'
        # gradients are whole before they are scattered.
        weights += (2 * shape.layer + shape.embedding) * BFLOAT16
        gradients += 2 * shape.layer * BFLOAT16 if full else 0
    return weights, gradients, moments // shards


def hidden_states(shape: Shape, tokens: int, arithmetic: Arithmetic) -> int:
    """Return bytes of a layer's input, which checkpointing saves."""
    return tokens * shape.hidden * (FLOAT32 if arithmetic in WIDE_STREAM else BFLOAT16)


def loss_bytes(shape: Shape, tokens: int, arithmetic: Arithmetic, on_cpu: bool) -> tuple[int, int]:
    """Return bytes of the plain loss and of TRL's in chunks: logits, all or a tile, and the final hidden states with
    gradient. In chunks, gradients of the hidden states are summed in float32 once more.
    """
    per_logit = (FLOAT32 if arithmetic == "float32" else BFLOAT16) + (LOSS_TILE_UNFUSED if on_cpu else 0)
    tile = min(tokens, LOSS_TILE_TOKENS) * min(shape.vocabulary, LOSS_TILE_VOCABULARY) * per_logit
    common = 2 * hidden_states(shape, tokens, arithmetic)
    return tokens * shape.vocabulary * PLAIN_LOSS + common, tile + tokens * shape.hidden * FLOAT32 + common


def _activations(shape: Shape, recipe: Recipe, tokens: int, arithmetic: Arithmetic) -> tuple[int, int]:
    """Return bytes kept from the forward pass, and bytes at work on top of them inside one layer."""
    training, tuning, hardware = recipe.training, recipe.tuning, recipe.hardware
    mlp_share = min(1.0, (training.mlp_chunk_tokens or tokens) / tokens)
    kept, peak = layer_bytes(shape, tuning, arithmetic, hardware.context_parallel, mlp_share)
    adapts_experts = tuning.method != "full" and tuning.target_modules == "all-linear"
    of_experts = ADAPTED_EXPERTS * shape.experts / shape.layers * adapts_experts
    kept, peak = kept * tokens + of_experts, peak * tokens + of_experts
    checkpointed = training.checkpointed_layers(shape.layers)
    resident = RESIDENT_WHEN_OFFLOADED if hardware.offload_activations else checkpointed
    of_checkpointed = hidden_states(shape, tokens, arithmetic)
    if training.activation_checkpointing == "selective":
        of_checkpointed += tokens * shape.queries * (FLOAT32 if arithmetic == "float32" else BFLOAT16)
    in_all = resident * of_checkpointed + (shape.layers - checkpointed) * kept
    return round(in_all), round(peak if checkpointed else peak - kept)


def layer_bytes(
    shape: Shape, tuning: Tuning, arithmetic: Arithmetic, context_parallel: int = 1, mlp_share: float = 1.0
) -> tuple[float, float]:
    """Return bytes per token of one layer: kept for the backward, and at the peak of its recomputation and backward.

    The peak is in the backward of the MLP, or in that of attention where context parallelism gathers the keys and
    values of the whole sequence. `mlp_share` is the share of the tokens that an MLP takes at a time.
    """
    full = tuning.method == "full"
    hidden, intermediate = (_FULL if full else _LORA)[arithmetic]
    # Attention keeps q and its output, k and v.
    width = 2 if arithmetic == "float32" else 1
    # What norms keep beyond that: one of q and k a float32 copy, a third or fourth one of hidden states (Gemma) its
    # float32 values as well, and one that trains with LoRA the normalized values.
    normalized = 4 if arithmetic in WIDE_STREAM else 2
    norms = 4 * max(0, shape.norms - 2) + (normalized if tuning.with_norms and not full else 0)
    common = _bytes(shape, norms, heads=2 * width + (3 if shape.head_normed else 0))
    kept = _bytes(shape, hidden, intermediate)
    peak = kept + _bytes(shape, *_BACKWARD[arithmetic])
    if mlp_share < 1:
        kept = _bytes(shape, hidden)
        peak = min(peak, kept + _bytes(shape, _AROUND_CHUNKS) + mlp_share * peak)
    # The gradients of q, k and v; the k and v of all devices, and their gradients (torch's all-gather rotation).
    gathered = width * (shape.queries + (2 + 4 * context_parallel) * shape.keys) * BFLOAT16
    return kept + common, max(peak, _bytes(shape, hidden) + gathered) + common


def _bytes(shape: Shape, hidden: float, intermediate: float = 0, heads: float = 0) -> float:
    """Return bytes per token of bfloat16 tensors, so many of each width; `heads` are of queries and of keys."""
    of_mlp = hidden * shape.hidden + intermediate * shape.intermediate
    return (of_mlp + heads * (shape.queries + shape.keys)) * BFLOAT16
