"""Forward passes of measurements: a prefix that prompts share, logits in parts, and the memory that they take."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from architectures import PROMISED, small_config, small_model, stretched
from pi_lora.api import load
from pi_lora.evaluation import forward as module
from pi_lora.evaluation.forward import last_logits, shared_prefix, token_losses
from pi_lora.model_ref import ModelRef
from pi_lora.scaling.extension import Extension

LENGTH, TAIL = 60, 5
SHARE = {"llama", "qwen2", "qwen3", "olmo2", "granite", "gpt_neox", "stablelm", "cohere", "smollm3"}
# Sliding windows, state spaces and convolutions beside attention.
CANNOT = {"gemma2", "gemma3_text", "bamba", "lfm2_moe"}


def small(model_type: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(model_type))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model.eval()


def rows() -> list[list[int]]:
    """Three inputs that begin alike, the last one shorter."""
    ids = torch.randint(2, 64, (3, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    return [ids[0], ids[0][:40] + ids[1][40:], ids[0][:45] + ids[2][45:-1]]


@pytest.mark.parametrize("model_type", sorted(SHARE))
def test_logits_with_a_shared_prefix_equal_those_of_whole_inputs(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "pass_tokens", lambda model: 36)
    model = small(model_type)
    with torch.no_grad():
        prefix = shared_prefix(model, rows()[0], LENGTH)
        expected = [model(input_ids=torch.tensor([row])).logits[0, -TAIL:] for row in rows()]
    for _ in range(2):
        for row, logits in zip(rows(), expected, strict=True):
            torch.testing.assert_close(last_logits(model, row, TAIL, prefix), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", sorted(SHARE | CANNOT))
def test_only_models_with_a_full_kv_cache_share_a_prefix(model_type: str) -> None:
    with torch.no_grad():
        prefix = shared_prefix(small(model_type), rows()[0][:50], LENGTH)
    assert (prefix is not None) == (model_type in SHARE)


def test_a_prefix_is_shared_only_if_its_cache_fits_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the prefix and of the input beside it, in at most three quarters of what is free."""
    model, config = small("llama"), small_config("llama")
    width = config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * width * 4
    for missing in (0, 1):
        room = -(-per_token * (50 + LENGTH) * 4 // 3) - missing
        monkeypatch.setattr(module, "free_memory", lambda _device, room=room: room)
        with torch.no_grad():
            assert (shared_prefix(model, rows()[0][:50], LENGTH) is None) == bool(missing)


@torch.no_grad()
def test_the_attention_mask_after_a_prefix_has_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, row = small("llama"), rows()[0]
    prefix = shared_prefix(model, row[:10], LENGTH)
    most, plain = 0, torch.nn.functional.scaled_dot_product_attention

    def watched(*tensors: torch.Tensor, attn_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, attn_mask.numel())
        return plain(*tensors, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    whole = last_logits(model, row, TAIL, prefix)
    assert most == (LENGTH - 10) * LENGTH
    most, bound = 0, 2 * TAIL * LENGTH
    monkeypatch.setattr(module, "MASKED_PAIRS", bound)
    torch.testing.assert_close(last_logits(model, row, TAIL, prefix), whole, rtol=1e-6, atol=1e-5)
    assert most <= bound


@pytest.mark.parametrize("model_type", [*PROMISED, "modernbert-decoder"])
def test_logits_computed_in_parts_equal_the_models(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an architecture does to them: Gemma 2 caps them, Cohere and Granite scale them."""
    config = small_config(model_type)
    model = small_model(type(config), stretched(config)[1])
    ids = torch.randint(2, 60, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    tokens = list(range(1, 48, 3))
    monkeypatch.setattr(module, "LOGITS_ON_CPU", 2 * 5 * logits.shape[-1])
    for row, losses in enumerate(token_losses(model, ids, tokens)):
        expected = cross_entropy(logits[row, [token - 1 for token in tokens]], ids[row, tokens], reduction="none")
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)


def test_memory_of_logits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("llama")
    monkeypatch.setattr(module, "LOGITS_ON_CPU", 10 * 64)
    sizes: list[int] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _module, _inputs, logits: sizes.append(logits.numel())
    )
    token_losses(model, torch.full((1, 60), 5), range(1, 60))
    hook.remove()
    assert sizes == [10 * 64] * 5 + [9 * 64]


@pytest.mark.parametrize(("scaling", "requested", "expected"), [("yarn", None, 32), ("yarn", 8, 8), ("dynamic", 8, 1)])
def test_prompts_whose_length_changes_the_rope_are_continued_alone(
    scaling: str, requested: int | None, expected: int
) -> None:
    loaded = load(ModelRef("builtin:tiny", extension=Extension(512, scaling=scaling)))
    assert module.prompts_at_once(loaded, 512, requested) == expected
