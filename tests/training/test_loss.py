"""The loss from all logits, and TRL's in chunks where they do not fit, are the same numbers."""

from pathlib import Path

import pytest
from conftest import small_recipe, train
from transformers import Trainer
from trl import SFTTrainer

from pi_lora.run import Run

EXAMPLES = {"source": "examples.jsonl", "template": "{question}", "completion": "answer", "completion_tokens": 40}
KINDS: dict[str, dict[str, object]] = {
    "packed": {},
    "accumulated": {"per_device_batch_size": 1},
    "bfloat16": {"precision": "bfloat16"},
    "all weights": {"tuning": {"method": "full"}},
    "examples": {"data": EXAMPLES},
}


@pytest.mark.parametrize("kind", KINDS)
def test_plain_and_chunked_losses_are_equal(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = (f'{{"question": "{number}?", "answer": "{"yes " * number}"}}\n' for number in range(1, 9))
    Path("examples.jsonl").write_text("".join(lines))
    training = {**small_recipe(small_model).training.model_dump(), "precision": "float32"}
    changes = KINDS[kind] if kind in ("all weights", "examples") else {"training": training | KINDS[kind]}
    recipe = small_recipe(small_model, **{"training": training, **changes})
    with monkeypatch.context() as patch:
        patch.setattr(SFTTrainer, "compute_loss", None)
        plain = Run(train(recipe, tmp_path / "plain"))
    monkeypatch.setattr("pi_lora.training.job.TrainingJob.loss_kernel", "chunked")
    monkeypatch.setattr(Trainer, "compute_loss", None)
    chunked = Run(train(recipe, tmp_path / "chunked"))
    losses = [line["loss"] for line in chunked.log]
    assert plain.log[0]["loss"] == pytest.approx(losses[0], abs=1e-5)
    # In bfloat16 gradients are rounded otherwise, and with them the weights after a step.
    tolerance = 1e-2 if kind == "bfloat16" else 1e-5
    assert [line["loss"] for line in plain.log] == pytest.approx(losses, abs=tolerance)
