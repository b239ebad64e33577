"""The blockwise kernel against attention written out, with caches, and in memory."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import architectures
from pi_lora.data.batches import collate
from pi_lora.data.packing import pose_positions
from pi_lora.models import attention
from pi_lora.models.attention import (
    BLOCKWISE,
    blockwise_attention,
    blockwise_mask,
    isolates_sequences,
    use_blockwise,
)
from pi_lora.models.loaded import LoadedModel, load_base
from pi_lora.models.resolve import resolve_model

WIDTH, CAP = 8, 3.0
# A soft cap, and whether there are sinks: no model of transformers has both.
CAPS_AND_SINKS = [(None, False), (CAP, False), (None, True)]
WINDOW, BLOCK = 12, 8
KERNELS = ("eager", "sdpa", BLOCKWISE)


class Layer(torch.nn.Module):
    """What a kernel reads of an attention layer."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    bias: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    """Attention by its definition: (batch, queries, heads, width)."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, dim=1).mT * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~visible, torch.finfo(query.dtype).min)
    if sinks is not None:
        of_sink = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, of_sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return (weights @ value.repeat_interleave(groups, dim=1)).transpose(1, 2)


def tensors(heads: int, key_heads: int, queries: int, keys: int, seed: int = 0) -> list[torch.Tensor]:
    """Query, key, value and sinks of two sequences."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, queries, WIDTH), (2, key_heads, keys, WIDTH), (2, key_heads, keys, WIDTH), (heads,)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) * 2 for shape in shapes]
    return [each.requires_grad_() for each in drawn]


def assert_computed(
    mask: Any,
    visible: torch.Tensor,
    inputs: list[torch.Tensor],
    cap_and_sinks: tuple[float | None, bool],
    *,
    groups: int = 2,
    bias: torch.Tensor | float = 0.0,
) -> None:
    """Under a mask, the kernel gives the outputs of queries that see something, and the gradients of a sum of them with
    random factors, as they are written out: of query, key, value and sinks.
    """
    softcap, with_sinks = cap_and_sinks
    *qkv, sinks = inputs
    if not with_sinks:
        inputs, sinks = qkv, None
    visible = visible.expand(2, -1 if visible.dim() == 4 else 1, -1, -1)
    real = visible.any(dim=-1).transpose(1, 2)[..., None]
    got, _ = blockwise_attention(Layer(groups), *qkv, mask, softcap=softcap, s_aux=sinks, dropout=0.0)
    expected = written_out(*qkv, visible, sinks, softcap, bias)
    factors = torch.randn(got.shape, generator=torch.Generator().manual_seed(9), dtype=got.dtype)
    both = [each.where(real, 0) for each in (got, expected)]
    torch.testing.assert_close(*both, rtol=1e-11, atol=1e-11)
    gradients = [torch.autograd.grad((each * factors).sum(), inputs) for each in both]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)


@given(
    block=st.sampled_from([3, 8, 16]),
    length=st.integers(1, 40),
    cached=st.integers(0, 20),
    window=st.none() | st.integers(1, 45),
    key_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    padding=st.integers(0, 6),
    cap_and_sinks=st.sampled_from(CAPS_AND_SINKS),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_a_mask_of_a_model_is_obeyed(
    block: int,
    length: int,
    cached: int,
    window: int | None,
    key_heads: int,
    groups: int,
    padding: int,
    cap_and_sinks: tuple[float | None, bool],
    seed: int,
) -> None:
    """A cache, which drops the keys before a window, and padding on the left of the second sequence."""
    total = cached + length
    padding = min(padding, total - 1)
    dropped = max(0, cached - window + 1) if window else 0
    queries, keys = torch.arange(cached, total), torch.arange(dropped, total)
    visible = keys <= queries[:, None]
    if window:
        visible &= keys > queries[:, None] - window
    visible = visible.expand(2, 1, -1, -1).clone()
    visible[1] &= keys >= padding
    given_mask = torch.ones(2, total, dtype=torch.bool)
    given_mask[1, :padding] = False

    inputs = tensors(key_heads * groups, key_heads, length, len(keys), seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", block)
        mask = blockwise_mask(
            batch_size=2,
            q_length=length,
            kv_length=len(keys),
            q_offset=cached,
            kv_offset=dropped,
            mask_function=sliding_window_causal_mask_function(window) if window else causal_mask_function,
            attention_mask=given_mask,
            local_size=window,
        )
        assert_computed(mask, visible, inputs, cap_and_sinks, groups=groups)


@given(
    first=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 20),
    cap_and_sinks=st.sampled_from(CAPS_AND_SINKS),
)
@settings(max_examples=25)
def test_packed_texts_are_apart(first: list[int], window: int | None, cap_and_sinks: tuple[float | None, bool]) -> None:
    """The second row holds the texts of the first in the reverse order."""
    length = sum(first)
    text = torch.stack([torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in (first, first[::-1])])
    sees = sliding_window_causal_mask_function(window) if window else causal_mask_function
    ago = torch.arange(length)[:, None] - torch.arange(length)
    visible = (ago >= 0) & (ago < (window or length)) & (text[:, :, None] == text[:, None, :])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", BLOCK)
        mask = blockwise_mask(
            batch_size=2,
            q_length=length,
            kv_length=length,
            mask_function=and_masks(sees, packed_sequence_mask_function(text)),
            local_size=window,
            allow_is_causal_skip=False,
        )
        assert_computed(mask, visible[:, None], tensors(4, 2, length, length), cap_and_sinks)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("cap_and_sinks", CAPS_AND_SINKS)
def test_later_keys_are_seen_where_the_mask_says_so(cap_and_sinks: tuple[float | None, bool]) -> None:
    """Windows to both sides, as in embedding models."""
    length, window = 30, 5
    mask = blockwise_mask(
        batch_size=2,
        q_length=length,
        kv_length=length,
        mask_function=sliding_window_bidirectional_mask_function(window),
        local_size=window,
        allow_is_causal_skip=False,
    )
    visible = (torch.arange(length)[:, None] - torch.arange(length)).abs() <= window
    assert_computed(mask, visible, tensors(4, 2, length, length), cap_and_sinks)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("cap_and_sinks", CAPS_AND_SINKS)
@pytest.mark.parametrize("heads_of_mask", [1, 4])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_tensors_that_models_make_are_obeyed(
    kind: str, heads_of_mask: int, cap_and_sinks: tuple[float | None, bool]
) -> None:
    """They need not be causal: images are seen as a whole."""
    queries, keys = 21, 26
    generator = torch.Generator().manual_seed(3)
    visible = torch.rand(2, heads_of_mask, queries, keys, generator=generator) < 0.5
    visible[..., 0] = True
    mask: torch.Tensor = visible
    bias: torch.Tensor | float = 0.0
    if kind == "additive":
        bias = torch.randn(visible.shape, generator=generator, dtype=torch.float64)
        mask = bias.masked_fill(~visible, torch.finfo(torch.float64).min)
    assert_computed(mask, visible, tensors(4, 2, queries, keys), cap_and_sinks, bias=bias)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("cap_and_sinks", CAPS_AND_SINKS)
def test_without_a_mask_attention_is_causal(cap_and_sinks: tuple[float | None, bool]) -> None:
    visible = torch.ones(21, 21, dtype=torch.bool).tril()
    assert_computed(None, visible, tensors(4, 2, 21, 21), cap_and_sinks)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("softcap", "with_sinks"), CAPS_AND_SINKS)
def test_bfloat16_is_close_to_float32(softcap: float | None, with_sinks: bool) -> None:
    length = 45
    rounded = [each.detach().bfloat16() for each in tensors(4, 2, length, length)]
    query, key, value, sinks = rounded
    mask = blockwise_mask(
        batch_size=2,
        q_length=length,
        kv_length=length,
        mask_function=sliding_window_causal_mask_function(WINDOW),
        local_size=WINDOW,
    )
    got, _ = blockwise_attention(
        Layer(2), query, key, value, mask, softcap=softcap, s_aux=sinks if with_sinks else None
    )
    ago = torch.arange(length)[:, None] - torch.arange(length)
    exact = [each.float() for each in (query, key, value)]
    expected = written_out(*exact, (ago >= 0) & (ago < WINDOW), sinks.float() if with_sinks else None, softcap)
    assert got.dtype == torch.bfloat16
    # A value rounded to 8 bits, and weights from scores of up to about 10.
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=0.08)


@pytest.mark.parametrize(("softcap", "with_sinks"), CAPS_AND_SINKS)
def test_dropout_takes_some_weights_and_scales_the_others(softcap: float | None, with_sinks: bool) -> None:
    query, key, _, sinks = (each.detach() for each in tensors(4, 2, WIDTH, WIDTH))
    value = torch.eye(WIDTH, dtype=torch.float64).expand(2, 2, -1, -1)  # outputs are weights
    mask = blockwise_mask(
        batch_size=2,
        q_length=WIDTH,
        kv_length=WIDTH,
        mask_function=sliding_window_causal_mask_function(5),
        local_size=5,
    )
    options: dict[str, Any] = {"softcap": softcap, "s_aux": sinks if with_sinks else None}
    weights, _ = blockwise_attention(Layer(2), query, key, value, mask, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dropped, _ = blockwise_attention(Layer(2), query, key, value, mask, dropout=0.3, **options)
    kept = dropped != 0
    torch.testing.assert_close(dropped, (weights / 0.7).where(kept, 0))
    assert 0.6 < kept.sum() / (weights != 0).sum() < 0.8


def small(model_type: str, **changes: Any) -> PreTrainedModel:
    """A small model with short windows, which computes in float32 as users' do."""
    config = architectures.small_config(model_type)
    if getattr(config, "sliding_window", None):
        config.sliding_window = WINDOW
    for name, value in changes.items():
        setattr(config, name, value)
    return architectures.small_model(type(config), config.to_dict())


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", BLOCK)


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(2, 60, shape, generator=torch.Generator().manual_seed(1))


CACHED = ["gemma3_text", "gpt_oss", "gemma2", "mistral", "llama"]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("model_type", CACHED)
def test_generation_from_a_prompt_beyond_the_window_equals_that_of_eager(model_type: str, padded: bool) -> None:
    model = small(model_type)
    model.generation_config.eos_token_id = None
    ids = random_ids(2, 25)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :9] = 0
    found = []
    for kernel in ("eager", BLOCKWISE):
        model.set_attn_implementation(kernel)
        found.append(
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=20,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        )
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(found[1].logits, found[0].logits, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("model_type", CACHED)
@torch.no_grad()
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(model_type: str) -> None:
    model = small(model_type)
    ids = random_ids(2, 41)
    model.set_attn_implementation("eager")
    whole = model(ids, use_cache=False).logits
    use_blockwise(model)
    cache = DynamicCache(config=model.config)
    parts = [model(chunk, past_key_values=cache).logits for chunk in torch.split(ids, [5, 13, 1, 9, 12, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("tokens", [9, 30])
@pytest.mark.parametrize("kept", [0, 1, 5])
def test_layers_that_share_keys_compute_the_logits_to_keep(tokens: int, kept: int) -> None:
    """Of Gemma 4, as E2B and E4B: below the window no layer has a mask."""
    model = small("gemma4_text")
    ids = random_ids(2, tokens)
    found = {}
    gradients = {}
    for kernel in ("eager", BLOCKWISE):
        model.set_attn_implementation(kernel)
        model.zero_grad()
        logits = model(ids, use_cache=False, logits_to_keep=kept).logits
        found[kernel] = logits.detach()
        logits[..., :9].sum().backward()
        gradients[kernel] = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert found["eager"].shape[1] == (kept or tokens)
    torch.testing.assert_close(found[BLOCKWISE], found["eager"], rtol=1e-4, atol=1e-4)
    for name, gradient in gradients["eager"].items():
        assert (gradients[BLOCKWISE][name] - gradient).norm() <= 1e-3 * gradient.norm(), name


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
@torch.no_grad()
def test_a_row_of_pose_is_seen_as_a_whole(model_type: str, rows: int) -> None:
    """transformers takes a jump of positions for another text if it gets no mask, whatever the kernel."""
    model = small(model_type)
    rng = random.Random(0)
    batch = collate(
        [
            {"input_ids": ids, "position_ids": torch.tensor(pose_positions(rng, 30, 200, 3))}
            for ids in random_ids(rows, 30)
        ]
    )
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, 0] += 1
    without_mask = {name: batch[name] for name in ("input_ids", "position_ids")}
    whole, apart = {}, {}
    for kernel in KERNELS:
        model.set_attn_implementation(kernel)
        whole[kernel] = model(**batch, use_cache=False).logits
        apart[kernel] = model(**without_mask, use_cache=False).logits
        assert (model(**changed, use_cache=False).logits - whole[kernel])[:, -1].abs().max() > 1e-3
    for kernel in KERNELS[1:]:
        torch.testing.assert_close(whole[kernel], whole["eager"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(apart[kernel], apart["eager"], rtol=1e-4, atol=1e-4)
    assert (whole[BLOCKWISE] - apart[BLOCKWISE]).abs().max() > 1e-2


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "gemma2", "gemma4_text"])
def test_gradient_checkpointing_changes_no_gradient(model_type: str) -> None:
    model = small(model_type).train()
    use_blockwise(model)
    ids = random_ids(2, 30)
    gradients = []
    for enabled in (False, True):
        if enabled:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    torch.testing.assert_close(gradients[1], gradients[0])


def packed_batch(lengths: Sequence[int], *, pose: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A batch of packed texts, and a batch of each text alone."""
    rng = random.Random(0)
    rows = [
        {
            "input_ids": random_ids(length) + number % 2,
            "position_ids": torch.tensor(pose_positions(rng, length, 200 if pose else length, min(length, 3))),
        }
        for number, length in enumerate(lengths)
    ]
    return collate(rows, isolates=True), [collate([row]) for row in rows]


def loss_and_gradients(model: PreTrainedModel, batches: list[dict[str, Any]]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The logits of batches of one row, and the gradients of the sum of the losses."""
    model.zero_grad()
    logits = []
    for batch in batches:
        output = model(**batch, use_cache=False, num_items_in_batch=1)
        logits.append(output.logits[0].detach())
        if len(batch["input_ids"][0]) > 1:  # else nothing is predicted
            output.loss.backward()
    return torch.cat(logits), {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("pose", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text", "gpt_oss", "gemma2", "llama4_text"])
def test_packed_sequences_compute_what_each_computes_alone(model_type: str, pose: bool) -> None:
    """Full attention, sliding windows, sinks, soft caps, chunks; also sequences that end within a block."""
    model = small(model_type).double().train()
    if model_type == "gpt_oss":
        model.set_experts_implementation("eager")  # the others have no float64
    use_blockwise(model)
    assert isolates_sequences(model)
    packed, alone = packed_batch([17, 5, 1, 30, 12], pose=pose)
    logits, gradients = loss_and_gradients(model, [packed])
    expected, gradients_alone = loss_and_gradients(model, alone)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == gradients_alone.keys()
    for name, gradient in gradients_alone.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma2"])
def test_time_and_memory_of_packed_sequences_are_linear_in_their_number(model_type: str) -> None:
    model = small(model_type)
    use_blockwise(model)
    counted = []
    for number in (8, 16):
        batch, _ = packed_batch([*[64] * number, 63])
        with Elements() as elements:
            model(**batch, use_cache=False).loss.backward()
        counted.append(elements)
    assert counted[1].largest <= 2.05 * counted[0].largest
    assert counted[1].total <= 2.05 * counted[0].total


class Elements(TorchDispatchMode):
    """Counts the elements of the tensors that are made: of all, and the most of one."""

    largest = 0
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel())
                self.total += leaf.numel()
        return output


@pytest.mark.parametrize("model_type", ["gemma3_text", "mistral"])
def test_time_and_memory_of_sliding_windows_are_linear_in_the_tokens(model_type: str) -> None:
    """Twice the tokens; sdpa makes a mask of n x n for them, and shows that the count sees it."""
    model = small(model_type, sliding_window=64)
    counted = {}
    for kernel in (BLOCKWISE, "sdpa"):
        model.set_attn_implementation(kernel)
        for tokens in (1024, 2048):
            ids = random_ids(1, tokens)
            with Elements() as counted[kernel, tokens]:
                model(ids, labels=ids, use_cache=False).loss.backward()
    once, twice = counted[BLOCKWISE, 1024], counted[BLOCKWISE, 2048]
    assert twice.largest <= 2.05 * once.largest
    assert twice.total <= 2.05 * once.total
    assert counted["sdpa", 2048].largest >= 3.9 * counted["sdpa", 1024].largest


@pytest.mark.parametrize(
    ("model_type", "kernel"),
    [("gpt_oss", BLOCKWISE), ("gemma2", BLOCKWISE), ("llama", BLOCKWISE), ("doge", "sdpa"), ("hy_v4", "eager")],
)
def test_models_that_sdpa_refuses_load(model_type: str, kernel: str, tmp_path: Path) -> None:
    """`auto` is the blockwise kernel, or transformers' default for models that make masks themselves."""
    small(model_type).save_pretrained(tmp_path)
    source = resolve_model(str(tmp_path))
    for placement in ("device", "empty"):
        loaded = LoadedModel(source, load_base(source, torch.float32, placement=placement))
        assert loaded.kernel == kernel
