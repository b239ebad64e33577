"""Batches of examples without a mask: padding on the right changes no loss and no gradient."""

import json
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
from conftest import small_recipe, train
from transformers import masking_utils
from transformers.models.llama import modeling_llama

from pi_lora.data.batches import collate
from pi_lora.models.resolve import resolve_model
from pi_lora.training.job import pack_data

PADDING = 1
LENGTHS = ((30, 10), (15, 6), (20, 20))


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 60, (40,), generator=torch.Generator().manual_seed(3))
    return collate([{"input_ids": ids[: n + m], "loss_mask": torch.arange(n + m) >= n} for n, m in LENGTHS], PADDING)


# Full attention, sliding windows shorter than the examples, LayerNorm and biases, state spaces, local and full layers.
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt_neox", "gemma3_text", "bamba"])
def test_right_padding_without_a_mask_changes_no_logits(model_type: str) -> None:
    config = architectures.small_config(model_type)
    if model_type == "mistral":
        config.sliding_window = 16
    model = architectures.small_model(type(config), config.to_dict()).double().train()
    found = []
    for mask in (batch()["attention_mask"], torch.ones_like(batch()["attention_mask"])):
        model.zero_grad()
        loss = model(**{**batch(), "attention_mask": mask}, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_only_eager_gets_a_mask(
    attention: str, lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": "The cat sat on the mat. " * words, "gist": f"Cat {words}."} for words in (1, 2, 3, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"source": str(tmp_path / "rows.jsonl"), "document": "text", "summary": "gist", "completion_tokens": 20}
    recipe = small_recipe(
        lora_run,
        scaling="keep",
        data={**source, "epochs": 4},
        model={"name": str(lora_run), "attention": attention},
    )
    masked = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(*tensors: torch.Tensor, attn_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        masked.append(attn_mask is not None)
        return plain(*tensors, attn_mask=attn_mask, **options)

    eager = modeling_llama.eager_attention_forward

    def watched_eager(*arguments: Any, **options: Any) -> Any:
        masked.append(arguments[4] is not None)
        return eager(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", watched_eager)
    run = train(recipe, tmp_path / "run")
    assert set(masked) == {attention == "eager"}
    log = [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]
    # Two steps are an epoch, whose tokens are counted without the padding.
    tokens = sum(len(row["input_ids"]) for row in pack_data(recipe, resolve_model(str(lora_run))).rows)
    assert [log[1]["tokens"], log[3]["tokens"]] == [tokens, 2 * tokens]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_jumps_of_pose_are_not_taken_for_packed_texts(
    batch_size: int, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers (5.23) looks for packed texts in the positions of a batch without a mask; no kernel would tell."""
    recipe = small_recipe(
        small_model,
        data={"source": "builtin:stdlib", "positions": "pose"},
        training={"steps": 2, "learning_rate": 1e-3, "global_batch_size": 2, "per_device_batch_size": batch_size},
    )
    positions = []
    forward = modeling_llama.LlamaModel.forward

    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        positions.append(options["position_ids"])
        return forward(self, *arguments, **options)

    looked = []
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", watched)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", looked.append)
    train(recipe, tmp_path / "run")
    assert any((each is not None) and (each.diff() > 1).any() for each in positions)
    assert not looked
