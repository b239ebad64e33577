import hashlib
import json
import random
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from pi_lora.data.packing import encoder, training_sequences
from pi_lora.data.recall import WORDS
from pi_lora.data.sources import RECALL, STDLIB
from pi_lora.errors import DataError
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.models.tokenizer import load_tokenizer
from pi_lora.recipe.files import load_recipe
from pi_lora.recipe.places import cache_folder
from pi_lora.recipe.schema import Data

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(BUILTIN_FOLDER / "tiny", 1024)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small library that is the same under every Python."""
    folder = tmp_path_factory.mktemp("library")
    rng = random.Random(0)
    for number in range(40):
        lines = (
            f"{rng.choice(WORDS)} = {rng.randrange(10**6)}  # {' '.join(rng.choices(WORDS, k=6))}" for _ in range(30)
        )
        (folder / f"module_{number}.py").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    for index in range(12):
        (folder / f"{index}.txt").write_text(f"book {index}: " + f"word{index} " * 20 * (index + 1))
    return folder


def sequences(tokenizer: Any, target: int, number: int, **data: object) -> list[list[int]]:
    found, _ = training_sequences(Data.model_validate(data), tokenizer, 64, target, number)
    return [row["input_ids"].tolist() for row in found]


def cache_entries() -> int:
    return len(list((cache_folder() / "sequences").glob("*/")))


@pytest.mark.parametrize(
    ("changes", "digest"),
    [
        ([], "3df25a85896a8746"),
        (["data.positions=skip", "data.chunks=3"], "2c538fef16385830"),
    ],
)
def test_a_recipe_gives_the_sequences_that_it_always_gave(tokenizer: Any, changes: list[str], digest: str) -> None:
    """Of the demo, on a library of our own. Raise `FORMAT` with these digests if sequences are to change."""
    data = load_recipe(RECIPES / "demo.yaml", changes).recipe.data
    found, _ = training_sequences(data, tokenizer, 256, 1024, 12)
    rows = [{name: row[name].tolist() for name in found.column_names} for row in found]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == digest


def test_sequences_have_exactly_the_length_and_follow_the_seed(tokenizer: Any, books: Path) -> None:
    data = {"source": [str(books), RECALL], "seed": 5}
    first = sequences(tokenizer, 128, 12, **data)
    assert [len(ids) for ids in first] == [128] * 12
    assert sequences(tokenizer, 128, 12, **data) == first
    assert sequences(tokenizer, 128, 12, **{**data, "seed": 6}) != first
    assert cache_entries() == 2


@pytest.mark.parametrize(("keys", "length"), [({}, 64), ({"sequence_tokens": 24}, 24)])
def test_skipping_sequences_have_the_original_window_or_less(tokenizer: Any, keys: dict[str, int], length: int) -> None:
    data = Data.model_validate({"source": [STDLIB, RECALL], "positions": "skip", "chunks": 3, **keys})
    found, _ = training_sequences(data, tokenizer, 64, 256, 40)
    assert {(len(row["input_ids"]), len(row["position_ids"])) for row in found} == {(length, length)}
    assert all((row["position_ids"][1:] > row["position_ids"][:-1]).all() for row in found)
    assert 200 < max(row["position_ids"][-1] for row in found) < 256
    assert {row["position_ids"][0] for row in found} == {0}
    plain = sequences(tokenizer, length, 40, source=[STDLIB, RECALL])
    assert [row["input_ids"].tolist() for row in found] == plain


def test_short_documents_are_left_out_and_counted(tokenizer: Any, books: Path) -> None:
    shortest = min(len(ids) for ids in encoder(tokenizer)([file.read_text() for file in books.iterdir()]))
    data = Data.model_validate({"source": str(books), "min_document_tokens": shortest + 1, "epochs": 3})
    found, notes = training_sequences(data, tokenizer, 64, 128, 80)
    assert "book 0" not in tokenizer.decode([token for row in found for token in row["input_ids"]])
    assert notes == [f"documents of under {shortest + 1} tokens left out: 1"]
    with pytest.raises(DataError, match=r"holds 0 tokens .*, documents of under 100000 tokens left out"):
        sequences(tokenizer, 128, 10, source=str(books), min_document_tokens=100000)


def test_too_little_text_names_both_numbers(tokenizer: Any, books: Path) -> None:
    with pytest.raises(DataError, match=r"books: holds [\d,]+ tokens in data.epochs: 1; 12,800 are needed") as refused:
        sequences(tokenizer, 128, 100, source=str(books))
    assert "add text, raise data.epochs, or lower training.steps" in str(refused.value)
    assert cache_entries() == 0


def test_every_epoch_has_an_order_of_its_own(tokenizer: Any, books: Path) -> None:
    number = sum(len(ids) for ids in encoder(tokenizer)([file.read_text() for file in books.iterdir()])) * 3 // 128
    found = sequences(tokenizer, 128, number, source=str(books), epochs=3)
    order = re.findall(r"book (\d+):", tokenizer.decode([token for ids in found for token in ids]))
    epochs = [order[start : start + 12] for start in (0, 12, 24)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(map(str, range(12)))
    assert epochs[0] != epochs[1]
    assert epochs[1] != epochs[2]


def test_sources_are_drawn_by_weight(tokenizer: Any, books: Path) -> None:
    """Sequences of recall begin with BOS; few of books do."""
    shares = [{"name": str(books), "weight": 3}, {"name": RECALL, "weight": 1}]
    found = sequences(tokenizer, 16, 800, source=shares, epochs=3)
    assert sum(ids[0] == tokenizer.bos_token_id for ids in found) / 800 == pytest.approx(0.25, abs=0.05)


def test_what_changes_the_sequences_changes_the_key(tokenizer: Any, books: Path) -> None:
    variants: list[dict[str, object]] = [
        {},
        {"seed": 1},
        {"positions": "skip"},
        {"positions": "skip", "sequence_tokens": 24},
        {"min_document_tokens": 50},
        {"epochs": 2},
        {"source": [{"name": str(books), "weight": 1}, {"name": STDLIB, "weight": 2}]},
    ]
    for variant in variants:
        sequences(tokenizer, 128, 4, **{"source": str(books), **variant})
    sequences(tokenizer, 128, 5, source=str(books))
    sequences(tokenizer, 96, 4, source=str(books))
    (books / "0.txt").write_text("rewritten")
    for _ in range(2):
        sequences(tokenizer, 128, 4, source=str(books))
        assert cache_entries() == len(variants) + 3
