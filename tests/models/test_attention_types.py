"""Every model type computes under the blockwise kernel what it computes under eager."""

from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

import architectures
from pi_lora.data.batches import collate
from pi_lora.models import attention
from pi_lora.models.attention import BLOCKWISE, MAKE_OWN_MASKS, isolates_sequences, use_blockwise

# Blocks divide neither the window nor the texts.
WINDOW, BLOCK, TOKENS = 12, 8, 30
# Their parts have sizes of their own, which a small config does not reach.
NOT_SMALL = {"blt", "dbrx"}
# Their classes do not let the kernel be chosen.
NO_CHOICE = {"falcon", "gpt_neox_japanese"}
# Differences in float64, as shares of the largest value of all tensors and of one. Norms and ropes compute in float32.
OF_ALL, OF_ONE = 2e-7, 1e-5
# Models for images and text. `gemma3n` needs the package timm. `paligemma` makes a mask for
# images, which takes tensors only.
COMPOSITES = """aya_vision cohere2_vision gemma3 gemma4 gemma4_unified glm4v idefics3 internvl lfm2_vl llama4 llava
mistral3 qwen2_5_vl qwen2_vl qwen3_5 qwen3_vl smolvlm""".split()
SAME = [
    name
    for name in [*architectures.MODEL_TYPES, *architectures.TEXT_PARTS, *COMPOSITES]
    if name not in MAKE_OWN_MASKS | NO_CHOICE | NOT_SMALL
]


def small(model_type: str) -> PreTrainedModel:
    kind: Any = AutoModel
    if model_type in architectures.MODEL_TYPES:
        kind = AutoModelForCausalLM
    if model_type in COMPOSITES:
        kind = AutoModelForImageTextToText
    config = (
        architectures.small_composite(model_type, small_text) if model_type in COMPOSITES else small_text(model_type)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = kind.from_config(deepcopy(config)).eval().double()
        for weights in model.parameters():
            if weights.dim() > 1:
                torch.nn.init.normal_(weights, std=0.2)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the others have no float64
    return model


def small_text(model_type: str) -> Any:
    config = architectures.small_config(model_type)
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(config, name, None):
            setattr(config, name, WINDOW)
    if model_type == "recurrent_gemma":
        config.num_hidden_layers = 3  # the third is the first with attention
    return config


def texts() -> Iterator[tuple[str, dict[str, torch.Tensor], torch.Tensor]]:
    """Two texts; two padded texts, on the left and on the right; two rows of two packed texts. With the tokens that are
    no padding.
    """
    ids = torch.randint(2, 60, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    every = torch.ones_like(ids, dtype=torch.bool)
    yield "plain", {"input_ids": ids}, every
    real = every.clone()
    real[0, :7] = False
    real[1, 21:] = False
    yield "padded", {"input_ids": ids, "attention_mask": real.long()}, real
    positions = [[*range(first), *range(TOKENS - first)] for first in (17, 5)]
    yield "packed", {"input_ids": ids, "position_ids": torch.tensor(positions)}, every


def computed(model: PreTrainedModel, kernel: str) -> dict[str, torch.Tensor]:
    """Outputs, and the gradients of a sum of them with random factors, by the kind of text and the weight."""
    model.set_attn_implementation(kernel)
    found = {}
    for kind, inputs, real in texts():
        model.zero_grad()
        output = model(**inputs, use_cache=False)[0][real]
        factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=output.dtype)
        (output * factors).mean().backward()
        found[f"{kind}: output"] = output.detach()
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                found[f"{kind}: gradient of {name}"] = weight.grad
    return found


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for kind in ("output", "gradient"):
        names = [name for name in expected if kind in name]
        largest = max(expected[name].abs().max() for name in names)
        for name in names:
            assert expected[name].isfinite().all(), name
            allowed = OF_ALL * largest + OF_ONE * expected[name].abs().max()
            assert (got[name] - expected[name]).abs().max() <= allowed, name


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The layers that were computed by the kernel, in small blocks."""
    counted: list[int] = []

    def kernel(module: Any, *arguments: Any, **options: Any) -> Any:
        counted.append(module.layer_idx)
        return attention.blockwise_attention(module, *arguments, **options)

    plain = torch.nn.functional.softmax

    def in_float64(scores: torch.Tensor, *arguments: Any, dtype: Any = None, **options: Any) -> torch.Tensor:
        """Eager asks for float32, where the mask of float64 is -inf, and a token without any other is NaN."""
        return plain(scores, *arguments, **options, dtype=torch.promote_types(scores.dtype, dtype or scores.dtype))

    monkeypatch.setattr(torch.nn.functional, "softmax", in_float64)
    monkeypatch.setattr(attention, "BLOCK", BLOCK)
    AttentionInterface.register(BLOCKWISE, kernel)
    yield counted
    AttentionInterface.register(BLOCKWISE, attention.blockwise_attention)


@pytest.mark.parametrize("model_type", SAME)
def test_logits_and_gradients_equal_those_of_eager(model_type: str, calls: list[int]) -> None:
    if model_type in architectures.MODEL_TYPES and not architectures.has_rope(model_type):
        pytest.skip("has no rope")
    model = small(model_type)
    use_blockwise(model)
    assert model.config.get_text_config()._attn_implementation == BLOCKWISE
    got = computed(model, BLOCKWISE)
    assert calls
    assert_same(got, computed(model, "eager"))


@pytest.mark.parametrize("model_type", SAME)
@torch.no_grad()
def test_packed_sequences_are_isolated_where_it_is_said(model_type: str, calls: list[int]) -> None:
    """And nowhere else: no model is refused for nothing."""
    if model_type in architectures.MODEL_TYPES and not architectures.has_rope(model_type):
        pytest.skip("has no rope")
    model = small(model_type)
    use_blockwise(model)
    rows = [{"input_ids": torch.arange(length) + 2 + length} for length in (17, 5, 1, 20)]
    is_isolated = False
    with suppress(ValueError):  # of some models with states
        packed = model(**forwarded(collate(rows, isolates=True)), use_cache=False)[0][0]
        alone = [model(**forwarded(collate([row])), use_cache=False)[0][0] for row in rows]
        difference = (packed - torch.cat(alone)).abs().max()
        is_isolated = bool(difference <= 1e-6 * torch.cat(alone).abs().max())
    assert is_isolated == isolates_sequences(model)


def forwarded(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: values for name, values in batch.items() if name != "labels"}


@pytest.mark.parametrize("model_type", sorted(MAKE_OWN_MASKS))
def test_models_that_make_masks_themselves_keep_their_kernel_and_need_to(model_type: str, calls: list[int]) -> None:
    model = small(model_type)
    default = model.config._attn_implementation
    use_blockwise(model)
    assert model.config._attn_implementation == default != BLOCKWISE
    with pytest.raises((AttributeError, TypeError, RuntimeError), match=r"BlockwiseMask|size of tensor"):
        computed(model, BLOCKWISE)


@pytest.mark.parametrize("model_type", sorted(NO_CHOICE))
def test_models_without_a_choice_keep_their_kernel(model_type: str, calls: list[int]) -> None:
    model = small(model_type)
    default = model.config._attn_implementation
    assert default != BLOCKWISE
    use_blockwise(model)
    assert model.config._attn_implementation == default
    model(torch.tensor([[2, 3, 4]]))
    assert not calls
