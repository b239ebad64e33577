"""Rows that train are made once and read back; their batches, and the loss of a batch against a plain reference: eager
attention under an explicit causal mask.
"""

import json
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pi_lora.data.batches import ABOUT, ROWS_AT_ONCE, LengthGroups, cached, collate
from pi_lora.data.packing import Row, skip_positions
from pi_lora.errors import DataError

ORIGINAL, TARGET = 64, 256
COLUMNS = ["input_ids", "position_ids"]
NUMBER = 2 * ROWS_AT_ONCE + 1
MAKER = """
import sys, time
from pathlib import Path
from pi_lora.data.batches import cached

def rows():
    Path(sys.argv[1], "making").touch()
    while not Path(sys.argv[1], "waited").exists():
        time.sleep(0.01)
    yield from ({"input_ids": [index] * 4} for index in range(10))

found, _ = cached({"of": "all"}, ["input_ids"], rows)
print(found["input_ids"][9].tolist())
"""


def rows() -> Iterator[Row]:
    return ({"input_ids": [index, 65535, 0, index], "position_ids": [0, 1, 2, 2**31 - 1]} for index in range(NUMBER))


def never() -> Iterator[Row]:
    pytest.fail("made again")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_sequences_are_made_once_and_read_back(folder: Path) -> None:
    made, _ = cached({"of": "this"}, COLUMNS, rows)
    again, _ = cached({"of": "this"}, COLUMNS, never)
    for found in (made, again):
        assert [row["input_ids"].tolist() for row in found] == [[index, 65535, 0, index] for index in range(NUMBER)]
        assert found[3]["position_ids"].tolist() == [0, 1, 2, 2**31 - 1]
        assert found[3]["position_ids"].dtype == np.int64
    [entry] = (path for path in (folder / "sequences").iterdir() if path.is_dir())
    assert json.loads((entry / ABOUT).read_text())["made_from"] == {"of": "this"}


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": lambda shard: shard.unlink(),
    "empty": lambda shard: shard.write_bytes(b""),
    "cut in the data": lambda shard: shard.write_bytes(shard.read_bytes()[:-100]),
    "cut after the schema": lambda shard: shard.write_bytes(shard.read_bytes()[:400]),
    "overwritten": lambda shard: shard.write_bytes(b"x" * shard.stat().st_size),
    "without its folder": lambda shard: shutil.rmtree(shard.parent),
    "short of a row": lambda shard: (shard.parent / ABOUT).write_text(f'{{"rows": {NUMBER + 1}, "notes": []}}'),
    "of other columns": lambda shard: cached({"of": "this"}, ["input_ids"], rows),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_again(folder: Path, damage: str) -> None:
    cached({"of": "this"}, COLUMNS, rows)
    [shard] = folder.rglob("*.arrow")
    DAMAGE[damage](shard)
    made = []

    def again() -> Iterator[Row]:
        made.append(damage)
        return rows()

    for _ in range(2):
        found, _ = cached({"of": "this"}, COLUMNS, again)
        assert found["input_ids"][9].tolist() == [9, 65535, 0, 9]
    assert made == [damage]


def test_what_breaks_off_leaves_nothing(folder: Path) -> None:
    def breaking() -> Iterator[Row]:
        yield from list(rows())[:5]
        raise DataError("books: hold too little")

    with pytest.raises(DataError, match="too little"):
        cached({"of": "this"}, COLUMNS, breaking)
    assert not [path for path in (folder / "sequences").iterdir() if path.is_dir()]
    assert len(cached({"of": "this"}, COLUMNS, rows)[0]) == NUMBER


def test_what_a_killed_process_left_is_no_hindrance(folder: Path) -> None:
    cached({"of": "this"}, COLUMNS, rows)
    [entry] = (path for path in (folder / "sequences").iterdir() if path.is_dir())
    entry.rename(entry.with_suffix(".partial"))
    assert len(cached({"of": "this"}, COLUMNS, rows)[0]) == NUMBER
    assert not list(folder.rglob("*.partial"))


def test_processes_at_once_make_it_once(python: str, folder: Path, tmp_path: Path) -> None:
    maker = subprocess.Popen([python, "-c", MAKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "making").exists():
        assert maker.poll() is None
        time.sleep(0.01)
    # The other process goes on when this one has begun to wait.
    threading.Timer(0.2, (tmp_path / "waited").touch).start()
    found, _ = cached({"of": "all"}, ["input_ids"], never)
    assert found["input_ids"][9].tolist() == [9, 9, 9, 9]
    assert maker.communicate(timeout=120)[0] == "[9, 9, 9, 9]\n"
    assert maker.returncode == 0


def test_a_complete_cache_may_be_read_only(folder: Path) -> None:
    """Shared or mounted; a folder in place of the lock stands for what cannot be written, also by root."""
    cached({"of": "this"}, COLUMNS, rows)
    [lock] = (folder / "sequences").glob("*.lock")
    lock.unlink()
    lock.mkdir()
    assert len(cached({"of": "this"}, COLUMNS, never)[0]) == NUMBER


def skipping(number: int, chunks: int = 3) -> list[dict[str, list[int]]]:
    rng = random.Random(number)
    return [
        {
            "input_ids": [rng.randrange(1024) for _ in range(ORIGINAL)],
            "position_ids": skip_positions(rng, ORIGINAL, TARGET, chunks),
        }
        for _ in range(number)
    ]


def reference_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Every token attends to all before it, with the rotary angles of its own position."""
    model.set_attn_implementation("eager")
    later = torch.full((ORIGINAL, ORIGINAL), torch.finfo(torch.float32).min).triu(diagonal=1)
    mask = later[None, None].expand(len(batch["input_ids"]), 1, -1, -1)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=mask).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()).item()


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], kernel: str) -> float:
    model.set_attn_implementation(kernel)
    with torch.no_grad():
        # As TRL trains: without a cache, which is when transformers looks for packed sequences.
        return model(**batch, use_cache=False).loss.item()


def test_padding_and_what_is_not_learned_have_no_label() -> None:
    chats = {"input_ids": [1, 2, 3, 4, 5], "learned": [False, True, False, False, True], "lengths": [2, 3]}
    batch = collate([chats, {"input_ids": [6, 7], "learned": [True, True]}], padding=9)
    assert batch["input_ids"].tolist() == [[1, 2, 9], [3, 4, 5], [6, 7, 9]]
    assert batch["labels"].tolist() == [[-100, 2, -100], [-100, -100, 5], [6, 7, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("size", [1, 2])
def test_chunks_attend_to_each_other(small_model: Path, size: int, kernel: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_model)
    batch = collate(skipping(size))
    expected = reference_loss(model, batch)
    assert loss(model, batch, kernel) == pytest.approx(expected, rel=1e-6)
    # What the mask is for: without it each chunk would be a sequence of its own.
    assert loss(model, {**batch, "attention_mask": None}, kernel) != pytest.approx(expected, rel=1e-3)


def test_groups_are_of_like_lengths_and_others_in_each_epoch() -> None:
    lengths = [100 * (1 + index % 40) for index in range(400)]
    groups = LengthGroups(lengths, 4, seed=0)
    orders = []
    for epoch in range(2):
        groups.set_epoch(epoch)
        order = list(groups)
        batches = [[lengths[index] for index in order[start : start + 4]] for start in range(0, 400, 4)]
        assert sum(4 * max(batch) for batch in batches) < 1.1 * sum(lengths)
        orders.append({frozenset(order[start : start + 4]) for start in range(0, 400, 4)})
    assert len(orders[0] & orders[1]) < 20
