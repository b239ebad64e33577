"""The order in which rows train."""

import itertools
import json
import shutil
import statistics
from pathlib import Path

import pytest

from conftest import small_recipe, train
from pi_lora.errors import Interrupted
from pi_lora.training.trainer import Trainer


def test_hardware_does_not_change_the_order_of_examples(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run may change the hardware."""
    rows = [{"question": "cat " * (1 + 7 * number % 11), "answer": f"{number}"} for number in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data: dict[str, object] = {"template": "{question}", "completion": "answer", "completion_tokens": 9, "epochs": 9}
    data["source"] = str(tmp_path / "rows.jsonl")
    orders: list[list[int]] = []

    def ordered(self: Trainer, checkpoint: Path | None) -> None:
        batches = self.get_train_dataloader()
        batches.set_epoch(1)
        orders.append([ids for batch in batches for ids in batch["input_ids"][batch["attention_mask"] == 1].tolist()])
        raise Interrupted("now")

    monkeypatch.setattr(Trainer, "train", ordered)
    training = {**small_recipe(small_model).training.model_dump(), "global_batch_size": 8}
    for hardware in ({}, {"cpu_processes": 2, "machines": 2}):
        recipe = small_recipe(small_model, data=data, training=training, hardware=hardware)
        with pytest.raises(Interrupted):
            train(recipe, tmp_path / "run")
    assert orders[0] == orders[1]
    assert len(orders[0]) > 300


def test_short_and_long_rows_are_mixed_from_the_first_step_to_the_last(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short chats beside long sequences, and examples of two kinds: long and short rows take turns throughout."""
    model = shutil.copytree(small_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Name {n}."},
                {"role": "assistant", "content": "lamp " * (n % 9 + 1)},
            ]
        }
        for n in range(1500)
    ]
    rows = [{"q": f"Name {n}.", "a": "lamp " * (2 if n % 2 else 30)} for n in range(240)]
    for name, written in (("chats", chats), ("rows", rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in written))
    kinds: dict[str, object] = {
        "chats": {"keep_short": 0.5, "source": {"name": str(tmp_path / "chats.jsonl"), "column": "messages"}},
        "rows": {"template": "{q}", "completion": "a", "completion_tokens": 60, "source": str(tmp_path / "rows.jsonl")},
    }
    lengths: list[int] = []

    def read(self: Trainer, checkpoint: Path | None) -> None:
        lengths[:] = [int(batch["attention_mask"].sum()) for batch in self.get_train_dataloader()]
        raise Interrupted("now")

    monkeypatch.setattr(Trainer, "train", read)
    training = {"steps": 60, "global_batch_size": 4, "per_device_batch_size": 1, "activation_checkpointing": False}
    for data in kinds.values():
        with pytest.raises(Interrupted):
            train(small_recipe(model, data=data, training=training), tmp_path / "run")
        assert len(lengths) == 240
        is_long = [length > statistics.fmean(lengths) for length in lengths]
        # Four batches of 15 steps, each sorted, as transformers orders them, have about 8 turns.
        turns = sum(before != after for before, after in itertools.pairwise(is_long))
        assert turns > 15
