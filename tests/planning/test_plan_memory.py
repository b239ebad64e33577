"""What the plan counts, counted again: parameters of models that transformers builds, bytes that torch allocates."""

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, get_args

import pytest
import torch
from families import SMALL, on_meta, small_config, small_shape
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from transformers.masking_utils import (
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from pi_lora.evaluation.forward import token_losses
from pi_lora.models.adapter import disable_input_dtype_casting, prepare_for_tuning
from pi_lora.models.attention import BLOCK_ON_GPU, BLOCKWISE, BlockwiseMask, blockwise_mask
from pi_lora.models.resolve import resolve_model
from pi_lora.models.shape import shape_of
from pi_lora.planning.flops import blocks_of, trained_parameters
from pi_lora.planning.gpus import CPU, GPUS
from pi_lora.planning.layer import ADAPTED_EXPERTS, Arithmetic, attention_bytes, layer_bytes
from pi_lora.planning.memory import FLOAT_LOGITS, LOSS_TOKENS, NF4, loss_bytes, measuring_bytes, memory
from pi_lora.recipe.schema import Recipe, Tuning
from pi_lora.training.loss import compute_loss_in_place
from pi_lora.training.trainer import chunk_mlps


def trained_by_peft(kind: str, tuning: Tuning) -> int:
    model = AutoModelForCausalLM.from_config(small_config(kind))
    return int(prepare_for_tuning(model, tuning, "small").num_parameters(only_trainable=True))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_adapted_experts_take_the_planned_memory(kind: str) -> None:
    """The part that does not depend on the tokens, by two lengths."""
    sizes = {"mixtral": {"num_local_experts": 8, "intermediate_size": 512}, "qwen3_moe": {"moe_intermediate_size": 512}}
    config = small_config(kind, hidden_size=256, **sizes[kind])
    shape = shape_of(on_meta(config))
    (kept, short), (more_kept, long) = (one_layer(config, Tuning(rank=1), tokens) for tokens in (64, 128))
    planned = ADAPTED_EXPERTS * shape.experts / shape.layers
    assert planned == pytest.approx(2 * short - long, rel=0.03)
    assert 2 * kept - more_kept < planned


TRAINED = {
    "all": Tuning(rank=4),
    "norms": Tuning(rank=4, modules_to_save="norms"),
    "attention": Tuning(rank=8, target_modules="attention", modules_to_save="nothing"),
    "full": Tuning(method="full"),
}
DENSE = ("llama", "qwen3", "gemma2", "phi3", "gpt_neox", "glm4", "nemotron", "phi", "starcoder2")


@pytest.mark.parametrize(
    ("kind", "tuning"),
    [
        *product(DENSE, TRAINED),
        *((kind, "all") for kind in ("mixtral", "qwen3_moe", "deepseek_v3", "qwen2_moe")),
    ],
)
def test_trained_parameters_equal_pefts(kind: str, tuning: str) -> None:
    assert trained_parameters(small_shape(kind), TRAINED[tuning]) == trained_by_peft(kind, TRAINED[tuning])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the hub counts them in the models' safetensors files
        ("huggyllama/llama-7b", 6_738_415_616),
        ("huggyllama/llama-65b", 65_285_660_672),
        ("meta-llama/Meta-Llama-3-8B", 8_030_261_248),
        ("mistralai/Mistral-7B-v0.3", 7_248_023_552),
        ("Qwen/Qwen3-8B-Base", 8_190_735_360),
    ],
)
def test_shipped_shapes_have_the_published_sizes(name: str, parameters: int) -> None:
    assert resolve_model(name, shipped=True).shape.parameters == parameters


def test_nf4_bytes_equal_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(1024, 512)
    packed, state = functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    stored = [packed, state.absmax, state.state2.absmax]
    assert sum(tensor.nbytes for tensor in stored) == pytest.approx(weight.numel() * NF4, rel=1e-6)


class Allocations(TorchDispatchMode):
    """Follows the bytes of all tensors made under it, and the most there were at once. Products of matrices are made
    without their numbers: in bfloat16, CPUs without instructions for it take nine tenths of these tests for them.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.mm.default:
            left, right = args
            made = left.new_zeros(len(left), right.shape[1])
        else:
            made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return made

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.live:
            self.live.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.live.discard(key)
        self.now -= size


@contextmanager
def known_to(allocations: Allocations, autocast: bool) -> Iterator[None]:
    with allocations, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        yield


LAYER = {
    **SMALL,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def one_layer(
    config: PreTrainedConfig,
    tuning: Tuning,
    tokens: int,
    arithmetic: Arithmetic = "bfloat16",
    mlp_chunk_tokens: int | None = None,
    kernel: str = "sdpa",
    mask: Any = None,
    backward: bool = True,
) -> tuple[int, int]:
    """Bytes that one layer keeps for its backward, and the most that it has at once, as torch allocates them. Without
    `backward`, that of the forward.
    """
    stream = torch.float32 if arithmetic in ("autocast", "float32") else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel, dtype=stream)
    tuned = prepare_for_tuning(model, tuning, "small")
    if mlp_chunk_tokens:
        chunk_mlps(tuned, mlp_chunk_tokens)
    layer = model.model.layers[0]
    hidden = torch.randn(1, tokens, config.hidden_size, dtype=stream, requires_grad=True)
    layer_type = config.layer_types[:1] if config.model_type == "gemma3_text" else ()
    positions = model.model.rotary_emb(hidden, torch.arange(tokens)[None], *layer_type)
    masks = [mask] if isinstance(mask, torch.Tensor) else []
    allocations = Allocations([hidden, *positions, *tuned.parameters(), *masks])
    autocast = arithmetic == "autocast" or (arithmetic == "bfloat16" and tuning.method != "full")
    casts = disable_input_dtype_casting(tuned, autocast)
    with casts:
        with known_to(allocations, autocast):
            output = layer(hidden, position_embeddings=positions, attention_mask=mask)
        kept = allocations.now - output.nbytes
        gradient = torch.ones_like(output)
        forward, allocations.most = allocations.most, 0
        if backward:
            with allocations:
                output.backward(gradient)
    # The output is not there when a checkpointed layer is walked back through; the gradient is, in the forward too.
    return kept, max(forward + gradient.nbytes, allocations.most)


TUNINGS = {
    "full": Tuning(method="full"),
    "lora": Tuning(rank=1),
    "lora on attention": Tuning(rank=1, target_modules="attention"),
}
EVERY_ARITHMETIC = pytest.mark.parametrize(
    ("name", "arithmetic"),
    [
        *(("lora", arithmetic) for arithmetic in get_args(Arithmetic)),
        ("full", "autocast"),
        *((name, arithmetic) for name in TUNINGS if name != "lora" for arithmetic in ("bfloat16", "float32")),
    ],
)


def per_token(
    config: PreTrainedConfig, tuning: Tuning, arithmetic: Arithmetic, pieces: int | None = None
) -> Iterator[float]:
    """Bytes kept and at the peak, as the difference between two lengths: what depends on weights alone drops out."""
    lengths = (256, 512)
    sizes = [one_layer(config, tuning, tokens, arithmetic, pieces and tokens // pieces) for tokens in lengths]
    yield from ((more - less) / 256 for less, more in zip(*sizes, strict=True))


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config, Glm4Config, Gemma3TextConfig])
@EVERY_ARITHMETIC
def test_a_layer_keeps_the_planned_activations(kind: type[PreTrainedConfig], name: str, arithmetic: Arithmetic) -> None:
    """LoRA on attention alone is planned coarsely, and rather too much."""
    config, tuning = kind(**LAYER, head_dim=32), TUNINGS[name]
    measured = per_token(config, tuning, arithmetic)
    coarse = name == "lora on attention"
    for size, expected in zip(measured, layer_bytes(shape_of(on_meta(config)), tuning, arithmetic), strict=True):
        assert 0.93 * size <= expected <= (1.4 if coarse else 1.1) * size


MASKS = {"auto": blockwise_mask, "sdpa": sdpa_mask, "eager": eager_mask}
SLIDING = {**LAYER, "head_dim": 32, "sliding_window": 128}


def mask_of(kernel: str, tokens: int, window: int | None) -> Any:
    sees = sliding_window_causal_mask_function(window) if window else causal_mask_function
    sizes = {"batch_size": 1, "q_length": tokens, "kv_length": tokens}
    return MASKS[kernel](**sizes, mask_function=sees, local_size=window, dtype=torch.bfloat16)


@pytest.mark.parametrize("kernel", ["auto", "sdpa"])
@pytest.mark.parametrize("kind", [MistralConfig, Gemma3TextConfig])
def test_a_sliding_layer_keeps_the_planned_masks_and_copies(kind: type[PreTrainedConfig], kernel: str) -> None:
    """In blocks, the first queries meet fewer keys than planned."""
    config = kind(**SLIDING)
    tokens = 512
    name = BLOCKWISE if kernel == "auto" else kernel
    mask = mask_of(kernel, tokens, config.sliding_window)
    with_window = one_layer(config, Tuning(rank=1), tokens, kernel=name, mask=mask)
    causal = one_layer(config, Tuning(rank=1), tokens)
    planned = attention_bytes(shape_of(on_meta(config)), kernel, tokens, "bfloat16", on_cpu=True)
    for size, without in zip(with_window, causal, strict=True):
        assert 0.98 * (size - without) <= planned.sliding <= 1.2 * (size - without)
    assert planned.masks == (mask.nbytes if kernel == "sdpa" else 0)


@pytest.mark.parametrize("window", [128, 1024, 1500])
def test_a_sliding_layer_keeps_the_planned_blocks_of_a_gpu(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockwiseMask, "size", BLOCK_ON_GPU)
    config = MistralConfig(**{**SLIDING, "sliding_window": window})
    tokens = 8192
    mask = mask_of("auto", tokens, window)
    with_window, _ = one_layer(config, Tuning(rank=1), tokens, kernel=BLOCKWISE, mask=mask, backward=False)
    # Each token as much as the others.
    causal, _ = one_layer(config, Tuning(rank=1), tokens // 8, backward=False)
    planned = attention_bytes(shape_of(on_meta(config)), "auto", tokens, "bfloat16", on_cpu=False)
    assert planned.sliding == pytest.approx(with_window - 8 * causal, rel=0.15)


@pytest.mark.parametrize("window", [128, 1024, None])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_planned_blocks_are_those_of_the_kernel(device: str, window: int | None) -> None:
    mask = dataclasses.replace(mask_of("auto", 4096, 128), device=device, reach=window)
    assert mask.size == blocks_of(4096, window or 0, on_cpu=device == "cpu").size


@pytest.mark.filterwarnings("ignore")  # of the factor of YaRN
def test_full_layers_with_sinks_keep_the_planned_blocks() -> None:
    """Between two lengths, so that everything but the blocks grows by the planned bytes per token."""
    config = GptOssConfig(**SMALL, num_key_value_heads=2, head_dim=32, num_local_experts=2, num_experts_per_tok=1)
    shape = shape_of(on_meta(config))
    short, longer = (one_layer(config, Tuning(rank=1), tokens, kernel=BLOCKWISE)[0] for tokens in (1024, 2048))
    of_short, of_longer = (
        attention_bytes(shape, "auto", tokens, "bfloat16", on_cpu=True).full for tokens in (1024, 2048)
    )
    assert of_longer - 2 * of_short == pytest.approx(longer - 2 * short, rel=0.05)


def test_eager_attention_keeps_the_planned_weights() -> None:
    config = MistralConfig(**SLIDING)
    tokens = 512
    mask = mask_of("eager", tokens, config.sliding_window)
    sizes = one_layer(config, Tuning(rank=1), tokens, kernel="eager", mask=mask)
    planned = attention_bytes(shape_of(on_meta(config)), "eager", tokens, "bfloat16", on_cpu=True)
    causal, _ = one_layer(config, Tuning(rank=1), tokens)
    assert planned.sliding == pytest.approx(sizes[0] - causal, rel=0.02)
    assert planned.peak == pytest.approx(sizes[1], rel=0.1)
    assert planned.masks == mask.nbytes


def test_only_kernels_with_masks_or_weights_are_planned_to_keep_them() -> None:
    """FlashAttention keeps nothing beyond queries, keys, values and output; nor does `sdpa` in full layers."""
    windowed, causal = (shape_of(on_meta(config)) for config in (MistralConfig(**SLIDING), LlamaConfig(**LAYER)))
    for shape, kernel in ((windowed, "flash_attention_2"), (causal, "sdpa"), (causal, "auto")):
        assert set(attention_bytes(shape, kernel, 1024, "bfloat16", on_cpu=False)) == {0}
    assert attention_bytes(windowed, "sdpa", 1024, "bfloat16", on_cpu=False).full == 0


@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config, Gemma3TextConfig, Qwen3_5TextConfig])
@pytest.mark.parametrize("intermediate", [64, 688])
def test_measuring_takes_the_planned_activations(
    kind: type[PreTrainedConfig], stream: torch.dtype, intermediate: int
) -> None:
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} if kind is Qwen3_5TextConfig else {}
    config = kind(**{**LAYER, "intermediate_size": intermediate}, **delta, head_dim=32)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=BLOCKWISE, dtype=stream)

    def most(tokens: int) -> int:
        with Allocations([*model.parameters(), *model.buffers()]) as allocations, torch.no_grad():
            model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        return allocations.most

    arithmetic: Arithmetic = "bfloat16" if stream == torch.bfloat16 else "float32"
    measured = (most(1024) - most(512)) / 512
    planned = measuring_bytes(shape_of(on_meta(config)), arithmetic, on_cpu=True)
    assert planned == pytest.approx(measured, rel=0.1)


def recipe_of(**training: object) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"name": "any"},
            "context": {"target": 4096},
            "data": {"source": "text"},
            "training": {"steps": 1, "warmup_steps": 0, **training},
            "evaluation": {"every": 1, "perplexity": {"data": "other"}},
        }
    )


def test_measuring_on_a_cpu_takes_the_planned_logits() -> None:
    """Of twice as many tokens as those whose logits are there at once."""
    config = LlamaConfig(**{**LAYER, "vocab_size": 2**15, "hidden_size": 64, "intermediate_size": 64}, head_dim=8)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.zeros(1, 2**11 + 1, dtype=torch.long)
    with torch.no_grad(), Allocations([*model.parameters(), *model.buffers()]) as allocations:
        token_losses(model, ids, range(1, 2**11 + 1))
    planned = memory(shape_of(on_meta(config)), recipe_of(precision="bfloat16"), 2048, GPUS[CPU])
    assert planned.components["logits"] == pytest.approx(allocations.most, rel=0.05)


def test_chunks_save_no_memory_of_experts() -> None:
    shape = small_shape("mixtral")
    whole, chunked = (
        memory(shape, recipe_of(mlp_chunk_tokens=chunk), 2048, GPUS["H100"]).peak for chunk in (None, 256)
    )
    assert whole == chunked


@EVERY_ARITHMETIC
def test_planned_memory_of_chunked_mlps_is_an_upper_bound(name: str, arithmetic: Arithmetic) -> None:
    config, tuning = LlamaConfig(**LAYER, head_dim=32), TUNINGS[name]
    shape = shape_of(on_meta(config))
    _, peak = per_token(config, tuning, arithmetic, pieces=4)
    expected, whole = (layer_bytes(shape, tuning, arithmetic, mlp_share=share)[1] for share in (1 / 4, 1.0))
    assert 0.97 * peak <= expected <= whole
    assert expected <= 1.2 * peak


@pytest.mark.parametrize("tokens", [256, 3 * LOSS_TOKENS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_loss_takes_the_planned_memory_on_a_cpu(dtype: torch.dtype, tokens: int) -> None:
    config = small_config("llama", vocab_size=4096)
    shape = shape_of(on_meta(config))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False)
    compute_loss_in_place(model)
    states = torch.randn(1, tokens + 1, shape.hidden, dtype=dtype, requires_grad=True)
    model.base_model.forward = lambda *_, **__: BaseModelOutputWithPast(states)
    ids = torch.zeros(1, tokens + 1, dtype=torch.long)
    with Allocations([states, ids, *model.parameters()]) as allocations:
        model(input_ids=ids, labels=ids, num_items_in_batch=1)[0].backward()
    arithmetic: Arithmetic = "float32" if dtype == torch.float32 else "bfloat16"
    # The hidden states were there before, and logits in float32 are no copies.
    there = states.nbytes + (FLOAT_LOGITS * 4 if arithmetic == "float32" else 0)
    planned = loss_bytes(shape, tokens, arithmetic, on_cpu=True)
    assert planned - there == pytest.approx(allocations.most, rel=0.05)
