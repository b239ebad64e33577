"""MLPs over pieces of a sequence: the same losses and gradients, less memory, and no more work."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import refused
from pi_lora.errors import ModelError
from pi_lora.models.adapter import prepare_for_tuning
from pi_lora.recipe.schema import Tuning
from pi_lora.training.trainer import chunk_mlps

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
TOKENS = 37
IDS = torch.randint(0, 96, (2, TOKENS), generator=torch.Generator().manual_seed(0))


def tuned_model(kind: str, tuning: Tuning, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE), dtype=dtype)
    tuned = prepare_for_tuning(model, tuning, "small")
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    return tuned.train()


def loss_and_gradients(model: Any, autocast: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def assert_alike(
    kind: str, tuning: Tuning, tokens: int, checkpointing: bool, dtype: torch.dtype = torch.float64
) -> None:
    plain, cut = (tuned_model(kind, tuning, dtype) for _ in range(2))
    chunk_mlps(cut, tokens)
    for model in (plain, cut):
        # PEFT and TRL switch it on in the base.
        if checkpointing:
            (model if tuning.method == "full" else model.get_base_model()).activation_checkpointing_enable()
    (loss, gradients), (cut_loss, cut_gradients) = (loss_and_gradients(model) for model in (plain, cut))
    torch.testing.assert_close(cut_loss, loss, rtol=1e-6, atol=0)
    assert set(cut_gradients) == set(gradients)
    assert any("mlp" in name or "proj" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(cut_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointed", "kept"])
@pytest.mark.parametrize("tokens", [1, 8, 37, 73], ids=lambda tokens: f"pieces of {tokens}")
@pytest.mark.parametrize("tuning", [Tuning(rank=4), Tuning(method="full"), Tuning(rank=4, target_modules="attention")])
def test_chunked_mlps_have_the_losses_and_gradients_of_whole_ones(
    tuning: Tuning, tokens: int, checkpointing: bool
) -> None:
    assert_alike("llama", tuning, tokens, checkpointing)


@pytest.mark.parametrize("kind", ["qwen3", "phi3", "gemma2", "gpt_neox"])
def test_chunked_mlps_of_other_architectures_equal_whole_ones(kind: str) -> None:
    assert_alike(kind, Tuning(rank=4), 8, checkpointing=True, dtype=torch.float32)


def test_under_autocast_gradients_agree_to_the_precision_of_bfloat16() -> None:
    tuning = Tuning(rank=4, modules_to_save="nothing")
    plain, cut = (tuned_model("llama", tuning, torch.bfloat16) for _ in range(2))
    chunk_mlps(cut, 8)
    (loss, gradients), (cut_loss, cut_gradients) = (loss_and_gradients(model, autocast=True) for model in (plain, cut))
    torch.testing.assert_close(cut_loss, loss, rtol=1e-2, atol=0)
    for name, gradient in gradients.items():
        assert cut_gradients[name].dtype == gradient.dtype == torch.float32
        scale = gradient.abs().max()
        torch.testing.assert_close(cut_gradients[name] / scale, gradient / scale, rtol=0, atol=3e-2, msg=name)


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointed", "kept"])
def test_chunked_mlps_compute_a_token_at_most_three_times(checkpointing: bool) -> None:
    """Forward, and once more for its gradients; checkpointing the layer adds a third time."""
    model = tuned_model("llama", Tuning(method="full"), torch.float32)
    seen: list[int] = []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    chunk_mlps(model, 8)
    if checkpointing:
        model.activation_checkpointing_enable()
    loss_and_gradients(model)
    assert max(seen) == 8
    assert sum(seen) <= (3 if checkpointing else 2) * SHAPE["num_hidden_layers"] * IDS.numel()


def test_chunking_a_mixture_of_experts_is_refused() -> None:
    config = AutoConfig.for_model("mixtral", **SHAPE, num_local_experts=2, num_experts_per_tok=1)
    with refused(ModelError, "training.mlp_chunk_tokens: "):
        chunk_mlps(AutoModelForCausalLM.from_config(config), 8)
