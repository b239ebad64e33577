"""The loss in place on a CPU: the loss and the gradients of the model's own, and those of TRL."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer
from trl import SFTTrainer

from conftest import small_recipe, train
from pi_lora.models.adapter import prepare_for_tuning
from pi_lora.recipe.schema import Tuning
from pi_lora.run import Run
from pi_lora.training import loss as in_place
from pi_lora.training.loss import compute_loss_in_place
from small_configs import SIZES

LORA = Tuning(rank=4, modules_to_save="nothing")
EMBEDDINGS = Tuning(rank=4, modules_to_save="embeddings_and_norms")
FULL = Tuning(method="full")
GROUPS = {"num_key_value_heads": 1}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {**GROUPS, "tie_word_embeddings": True}),
    "untied": ("llama", {**GROUPS, "tie_word_embeddings": False}),
    "soft caps": ("gemma2", {**GROUPS, "head_dim": 16, "final_logit_softcapping": 2.0}),
    "scaled": ("cohere", {**GROUPS, "logit_scale": 0.25}),
    "divided": ("granite", {**GROUPS, "logits_scaling": 3.0}),
    "bias": ("phi", {}),
}


def batch() -> dict[str, torch.Tensor]:
    """Three sequences of 20 tokens, two of them with tokens that have no loss."""
    ids = torch.randint(2, SIZES["vocab_size"], (3, 20), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :12] = -100
    labels[1, 15:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def loss_and_gradients(
    head: str, tuning: Tuning, dtype: torch.dtype, *, replaced: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of a model in train mode; a process of two would scale the loss by 2."""
    torch.manual_seed(0)
    kind, changes = HEADS[head]
    config = AutoConfig.for_model(kind, **SIZES, **changes)
    model = prepare_for_tuning(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tuning, "small").train()
    for name, weight in model.named_parameters():
        if "lora_B" in name or name.endswith("bias"):
            nn.init.normal_(weight, std=0.1)
    if replaced:
        compute_loss_in_place(model if tuning.method == "full" else model.get_base_model())
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        output = model(**batch(), num_items_in_batch=torch.tensor(50), use_cache=False)
    loss = 2 * output[0]
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("tuning", [LORA, EMBEDDINGS, FULL], ids=["LoRA", "embeddings", "full"])
@pytest.mark.parametrize("head", HEADS)
def test_loss_and_gradients_are_those_of_the_model(head: str, tuning: Tuning, monkeypatch: pytest.MonkeyPatch) -> None:
    # 41 tokens have a loss: six pieces, and float32 numbers of two tokens at a time.
    monkeypatch.setattr(in_place, "LOSS_TOKENS", 8)
    monkeypatch.setattr(in_place, "FLOAT_LOGITS", 2 * SIZES["vocab_size"])
    own = loss_and_gradients(head, tuning, torch.float32, replaced=False)
    replaced = loss_and_gradients(head, tuning, torch.float32, replaced=True)
    torch.testing.assert_close(replaced, own, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tuning", [LORA, FULL], ids=["LoRA", "full"])
def test_gradients_under_autocast_are_rounded_as_those_of_the_model(tuning: Tuning) -> None:
    own = loss_and_gradients("tied", tuning, torch.bfloat16, replaced=False)
    replaced = loss_and_gradients("tied", tuning, torch.bfloat16, replaced=True)
    torch.testing.assert_close(replaced, own, rtol=1e-6, atol=1e-8)


def test_logits_are_computed_once_and_for_labels_alone() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    compute_loss_in_place(model)
    computed = []
    model.lm_head.register_forward_hook(lambda _head, _states, logits: computed.append(logits.shape[1]))
    model(**batch())[0].backward()
    assert computed == [8 + 14 + 19]


def test_a_batch_without_labels_has_no_gradients() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    compute_loss_in_place(model)
    (loss,) = model(input_ids=torch.ones(1, 5).long(), labels=torch.full((1, 5), -100), num_items_in_batch=7)
    loss.backward()
    assert loss == 0
    assert all(weight.grad is None or not weight.grad.any() for weight in model.parameters())


EXAMPLES = {"source": "examples.jsonl", "template": "{question}", "completion": "answer", "completion_tokens": 40}
KINDS: dict[str, dict[str, object]] = {
    "packed": {},
    "accumulated": {"per_device_batch_size": 1},
    "bfloat16": {"precision": "bfloat16"},
    "all weights": {"tuning": {"method": "full"}},
    "examples": {"data": EXAMPLES},
}


@pytest.mark.parametrize("kind", KINDS)
def test_trainings_have_the_losses_of_trl(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = (f'{{"question": "{number}?", "answer": "{"yes " * number}"}}\n' for number in range(1, 9))
    Path("examples.jsonl").write_text("".join(lines))
    training = {**small_recipe(small_model).training.model_dump(), "precision": "float32"}
    changes = KINDS[kind] if kind in ("all weights", "examples") else {"training": training | KINDS[kind]}
    recipe = small_recipe(small_model, **{"training": training, **changes})

    def losses(name: str) -> list[float]:
        return [line["loss"] for line in Run(train(recipe, tmp_path / name)).log]

    with monkeypatch.context() as patch:
        patch.setattr(SFTTrainer, "compute_loss", None)
        replaced = losses("in_place")
    monkeypatch.setattr(Trainer, "compute_loss", SFTTrainer.compute_loss)
    of_trl = losses("of_trl")
    assert replaced[0] == pytest.approx(of_trl[0], abs=1e-5)
    # In bfloat16 gradients are rounded otherwise, and with them the weights after a step.
    assert replaced == pytest.approx(of_trl, abs=1e-2 if kind == "bfloat16" else 1e-5)
