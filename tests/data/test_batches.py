"""Rows that train are made once and read back; their batches, and the loss of a batch against a plain reference: eager
attention under an explicit causal mask.
"""

import random
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pi_lora.data.batches import cached, collate
from pi_lora.data.packing import Row, pose_positions
from pi_lora.errors import DataError

ORIGINAL, TARGET = 64, 256
COLUMNS = ["input_ids", "position_ids"]
NUMBER = 65
MAKER = """
import sys, time
from collections import Counter
from pathlib import Path
from pi_lora.data.batches import cached

def rows():
    Path(sys.argv[1], "making").touch()
    while not Path(sys.argv[1], "waited").exists():
        time.sleep(0.01)
    yield from ({"input_ids": [index] * 4} for index in range(10))

found = cached({"of": "all"}, ["input_ids"], rows, Counter())
print(found["input_ids"][9].tolist())
"""


def rows() -> Iterator[Row]:
    return ({"input_ids": [index, 65535, 0, index], "position_ids": [0, 1, 2, 2**31 - 1]} for index in range(NUMBER))


def never() -> Iterator[Row]:
    pytest.fail("made again")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sequences"


def test_packed_sequences_are_cached_and_read_back(folder: Path) -> None:
    for make in (rows, never):
        found = cached({"of": "this"}, COLUMNS, make, Counter())
        assert [row["input_ids"].tolist() for row in found] == [[index, 65535, 0, index] for index in range(NUMBER)]
        assert found[3]["position_ids"].tolist() == [0, 1, 2, 2**31 - 1]
        assert found[3]["position_ids"].dtype == torch.int64


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut in the data": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "cut in the index": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "cut after the schema": lambda file: file.write_bytes(file.read_bytes()[:400]),
    "overwritten": lambda file: file.write_bytes(b"x" * file.stat().st_size),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "without its folder": lambda file: shutil.rmtree(file.parent),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_rebuilt(folder: Path, damage: str) -> None:
    cached({"of": "this"}, COLUMNS, rows, Counter())
    [file] = folder.glob("*.arrow")
    DAMAGE[damage](file)
    made = []

    def again() -> Iterator[Row]:
        made.append(damage)
        return rows()

    for _ in range(2):
        found = cached({"of": "this"}, COLUMNS, again, Counter())
        assert found["input_ids"][9].tolist() == [9, 65535, 0, 9]
    assert made == [damage]


def test_an_exception_or_a_kill_leaves_no_partial_cache(folder: Path) -> None:
    def breaking() -> Iterator[Row]:
        yield from list(rows())[:5]
        raise DataError("books: hold too little")

    with pytest.raises(DataError):
        cached({"of": "this"}, COLUMNS, breaking, Counter())
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    cached({"of": "this"}, COLUMNS, rows, Counter())
    [file] = folder.glob("*.arrow")
    file.rename(file.with_suffix(".partial"))
    assert len(cached({"of": "this"}, COLUMNS, rows, Counter())) == NUMBER
    assert sorted(path.suffix for path in folder.iterdir()) == [".arrow", ".json", ".lock"]


def test_concurrent_processes_build_the_cache_once(python: str, folder: Path, tmp_path: Path) -> None:
    maker = subprocess.Popen([python, "-c", MAKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "making").exists():
        assert maker.poll() is None
        time.sleep(0.01)
    # The other process goes on when this one has begun to wait.
    threading.Timer(0.2, (tmp_path / "waited").touch).start()
    found = cached({"of": "all"}, ["input_ids"], never, Counter())
    assert found["input_ids"][9].tolist() == [9, 9, 9, 9]
    assert maker.communicate(timeout=120)[0] == "[9, 9, 9, 9]\n"
    assert maker.returncode == 0


def test_a_complete_cache_may_be_read_only(folder: Path) -> None:
    """Shared or mounted; a folder in place of the lock stands for what cannot be written, also by root."""
    cached({"of": "this"}, COLUMNS, rows, Counter())
    [lock] = folder.glob("*.lock")
    lock.unlink()
    lock.mkdir()
    assert len(cached({"of": "this"}, COLUMNS, never, Counter())) == NUMBER


def skipping(number: int, chunks: int = 3) -> list[dict[str, torch.Tensor]]:
    rng = random.Random(number)
    return [
        {
            "input_ids": torch.tensor([rng.randrange(1024) for _ in range(ORIGINAL)]),
            "position_ids": torch.tensor(pose_positions(rng, ORIGINAL, TARGET, chunks)),
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


def test_padding_and_masked_tokens_have_no_label() -> None:
    chats = {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [False, True, False, False, True], "lengths": [2, 3]}
    rows = [chats, {"input_ids": [6, 7], "loss_mask": [True, True]}]
    batch = collate([{name: torch.tensor(values) for name, values in row.items()} for row in rows], padding=9)
    assert batch["input_ids"].tolist() == [[1, 2, 9], [3, 4, 5], [6, 7, 9]]
    assert batch["labels"].tolist() == [[-100, 2, -100], [-100, -100, 5], [6, 7, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 0]]
    packed = collate([{name: torch.tensor(values) for name, values in row.items()} for row in rows], isolates=True)
    assert packed["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert packed["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1]]
    # No sequence predicts the first token of the next.
    assert packed["labels"].tolist() == [[-100, 2, -100, -100, 5, -100, 7]]
    assert packed["attention_mask"].all()
    assert packed["cu_seq_lens_q"].tolist() == packed["cu_seq_lens_k"].tolist() == [0, 2, 5, 7]
    assert packed["max_length_q"] == packed["max_length_k"] == 3


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("size", [1, 2])
def test_chunks_attend_to_each_other(small_model: Path, size: int, kernel: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_model)
    batch = collate(skipping(size))
    expected = reference_loss(model, batch)
    assert loss(model, batch, kernel) == pytest.approx(expected, rel=1e-6)
    # What the mask is for: without it each chunk would be a sequence of its own.
    assert loss(model, {**batch, "attention_mask": None}, kernel) != pytest.approx(expected, rel=1e-3)
