import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi_lora.data.corpus import RECALL, STDLIB, evaluation_documents, interleave, training_documents
from pi_lora.data.packing import encoder, training_sequences, wrapped
from pi_lora.data.recall import FORMS, recall_document
from pi_lora.data.stdlib import is_held_out, stdlib_documents
from pi_lora.errors import DataError
from pi_lora.evals.passkey import FILLER, STATEMENT
from pi_lora.model import BUILTIN_FOLDER, load_tokenizer
from pi_lora.recipe.schema import Data


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(BUILTIN_FOLDER / "tiny", 1024)


def words(text: str) -> int:
    return len(text.split())


def test_splits_are_disjoint_and_cover_the_library() -> None:
    train, held_out = ({name for name, _ in stdlib_documents(split)} for split in ("train", "held-out"))
    assert not train & held_out
    assert "argparse.py" in train | held_out
    assert len(train) > 300
    assert 0.05 < len(held_out) / len(train | held_out) < 0.2


def test_the_split_depends_on_the_name_alone() -> None:
    assert is_held_out("asyncio/base_events.py") == is_held_out("asyncio/base_events.py")
    share = sum(is_held_out(f"module_{i}.py") for i in range(5000)) / 5000
    assert share == pytest.approx(0.1, abs=0.02)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split must be one of"):
        next(stdlib_documents("test"))


@given(st.integers(0, 10**6), st.integers(30, 400))
def test_recall_documents_fit_their_budget(seed: int, budget: int) -> None:
    assert words(recall_document(random.Random(seed), budget, words)) <= budget


def test_recall_questions_are_answered_by_the_text_before() -> None:
    asked = 0
    for seed in range(200):
        lines = recall_document(random.Random(seed), 300, words).splitlines()
        for index, line in enumerate(lines):
            if line.startswith("print("):
                name, value = line.removeprefix("print(").split(")  # ")
                assert f"{name} = {value}" in lines[:index]
                asked += 1
    assert asked > 50


def test_tuning_documents_never_show_the_passkey_prompt() -> None:
    documents = itertools.islice(training_documents(RECALL, 0, 300, words), 300)
    text = "\n".join(document.text for document in documents)
    assert "pass key" not in text
    assert FILLER[:20] not in text
    assert STATEMENT not in {form for each in FORMS for form in each}


def test_training_documents_are_seeded_and_of_the_training_split() -> None:
    first = [document.name for document in training_documents(STDLIB, 1, 0, words)]
    assert first == [document.name for document in training_documents(STDLIB, 1, 0, words)]
    assert first != [document.name for document in training_documents(STDLIB, 2, 0, words)]
    assert not any(map(is_held_out, first))
    assert all(is_held_out(document.name) for document in evaluation_documents(STDLIB))


def test_local_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "empty.txt").write_text("  \n")
    assert [document.text for document in evaluation_documents(str(tmp_path))] == ["first", "second"]
    assert [document.text for document in evaluation_documents(str(tmp_path / "b.txt"))] == ["second"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "no such file or folder"),
        ("empty.txt", b" \n", "holds no text, its files are empty"),
        ("latin.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
        ("binary.txt", b"a\0b", "is a binary file"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        evaluation_documents(str(tmp_path / name))


def test_a_folder_without_text_and_an_unknown_corpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no text files"):
        evaluation_documents(str(tmp_path))
    with pytest.raises(DataError, match="no such built-in corpus"):
        evaluation_documents("builtin:pile")
    with pytest.raises(DataError, match="is for training"):
        evaluation_documents(RECALL)


@given(st.lists(st.lists(st.integers(0, 9), max_size=7), max_size=20), st.integers(1, 6))
def test_wrapped_packing_loses_only_the_last_rest(documents: list[list[int]], length: int) -> None:
    sequences = list(wrapped(documents, length))
    flat = [token for document in documents for token in document]
    assert [token for sequence in sequences for token in sequence] == flat[: len(flat) // length * length]
    assert all(len(sequence) == length for sequence in sequences)


def test_documents_are_framed_as_the_tokenizer_wants(tokenizer: Any) -> None:
    ids = encoder(tokenizer)("hello")
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.bos_token_id) == ids.count(tokenizer.eos_token_id) == 1


def test_sequences_have_exactly_the_length_and_follow_the_seed(tokenizer: Any) -> None:
    data = Data.model_validate({"source": [STDLIB, RECALL], "seed": 5})
    first = training_sequences(data, tokenizer, 128, 12)
    assert [len(ids) for ids in first["input_ids"]] == [128] * 12
    assert first["labels"] == first["input_ids"]
    assert training_sequences(data, tokenizer, 128, 12)["input_ids"] == first["input_ids"]
    other = Data.model_validate({"source": [STDLIB, RECALL], "seed": 6})
    assert training_sequences(other, tokenizer, 128, 12)["input_ids"] != first["input_ids"]


def test_recall_sequences_begin_with_a_document(tokenizer: Any) -> None:
    data = Data.model_validate({"source": RECALL})
    sequences = training_sequences(data, tokenizer, 256, 8)["input_ids"]
    assert {ids[0] for ids in sequences} == {tokenizer.bos_token_id}


def test_too_little_text_names_both_numbers(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("word " * 300)
    data = Data.model_validate({"source": str(tmp_path)})
    with pytest.raises(DataError, match=r"\d+ tokens at hand, 12,800 needed"):
        training_sequences(data, tokenizer, 128, 100)


def test_sources_are_mixed_by_weight() -> None:
    streams = [itertools.repeat([0]), itertools.repeat([1])]
    drawn = [stream for stream, _ in itertools.islice(interleave(streams, [3, 1], seed=0), 4000)]
    assert drawn.count(0) / 4000 == pytest.approx(0.75, abs=0.03)
