"""Documents to sequences: packed without a loss, mixed by weight, spread over positions, made once."""

import hashlib
import itertools
import json
import random
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import refused
from pi_lora.data import encoders, packing
from pi_lora.data.batches import TrainingData, collate, training_data
from pi_lora.data.documents import Document
from pi_lora.data.encoders import LINE_WIDTH, lines_of
from pi_lora.data.packing import OPEN_SEQUENCES, cut, grouped, packed, pose_positions
from pi_lora.data.recall import WORDS
from pi_lora.data.sources import STDLIB, Table, find_table
from pi_lora.data.tokens import Labelled
from pi_lora.errors import DataError
from pi_lora.models.files import BUILTIN_FOLDER
from pi_lora.models.tokenizer import load_tokenizer
from pi_lora.recipe.data import RECALL, Data, Source
from pi_lora.recipe.files import load_recipe
from pi_lora.recipe.schema import Training
from pi_lora.storage import cache_folder

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


def prepared(tokenizer: Any, target: int, number: int, original: int = 64, **data: object) -> TrainingData:
    training = Training(steps=number, global_batch_size=1)
    return training_data(Data.model_validate(data), training, tokenizer, original, target)


def sequences(tokenizer: Any, target: int, number: int, **data: object) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in prepared(tokenizer, target, number, **data).rows]


def tokens_in(tokenizer: Any, folder: Path) -> list[int]:
    """The tokens of every file, with EOS, which the tokenizer itself does not add."""
    return [len(tokenizer(file.read_text())["input_ids"]) + 1 for file in folder.iterdir()]


def cache_entries() -> int:
    return len(list((cache_folder() / "sequences").glob("*.arrow")))


@pytest.mark.parametrize(
    ("changes", "digest"),
    [
        ([], "729ce64e49a822d2"),
        (["data.positions=pose", "data.chunks=3"], "27a73f12419ce55d"),
    ],
)
def test_sequences_of_the_demo_recipe_do_not_change(tokenizer: Any, changes: list[str], digest: str) -> None:
    """Of the demo, on a library of our own. Raise `FORMAT` with these digests if sequences are to change."""
    data = load_recipe(RECIPES / "demo.yaml", changes).recipe.data
    found = prepared(tokenizer, 1024, 12, 256, **data.model_dump()).rows
    rows = [{name: row[name].tolist() for name in found.column_names} for row in found]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize(("keys", "length"), [({}, 64), ({"sequence_tokens": 24}, 24)])
def test_pose_sequences_have_at_most_the_original_window(tokenizer: Any, keys: dict[str, int], length: int) -> None:
    source = [STDLIB, RECALL]
    found = prepared(tokenizer, 256, 40, source=source, positions="pose", chunks=3, **keys).rows
    positions = torch.stack([row["position_ids"] for row in found])
    assert positions.shape == (40, length)
    assert (positions.diff() > 0).all()
    assert 200 < positions.max() < 256
    assert not positions[:, 0].any()
    plain = sequences(tokenizer, length, 40, source=source)
    assert [row["input_ids"].tolist() for row in found] == plain


@pytest.mark.parametrize("positions", ["contiguous", "pose"])
def test_short_sequences_of_text_have_the_original_window_and_positions_from_0(tokenizer: Any, positions: str) -> None:
    source = [{"name": STDLIB, "weight": 0.5}, {"name": RECALL, "weight": 0.5}]
    found = prepared(tokenizer, 256, 200, source=source, keep_short=0.25, positions=positions)
    length = 64 if positions == "pose" else 256
    short = []
    for row in found.rows:
        batch = collate([row])
        ids = batch["input_ids"]
        assert batch["attention_mask"].all()
        assert torch.equal(batch["labels"], ids)
        assert (ids[:, 0] == tokenizer.bos_token_id).all()
        plain = torch.arange(ids.shape[1]).expand_as(ids)
        is_short = ids.shape == (length // 64, 64) and torch.equal(batch.get("position_ids", plain), plain)
        assert is_short or ids.shape == (1, length)
        if is_short:
            short += ids.tolist()
    assert len(short) / (length // 64) / 200 == pytest.approx(0.25, abs=0.08)
    assert len({tuple(ids) for ids in short}) == len(short)
    # None is of recall; positions of PoSE may happen to be contiguous.
    of_text = [ids for ids in short if re.search(r"\d+  # ", tokenizer.decode(ids))]
    assert len(of_text) > 0.95 * len(short)


def test_recall_documents_have_the_other_text_of_the_recipe(tmp_path: Path, tokenizer: Any, books: Path) -> None:
    # A long line is wrapped.
    foxes = tmp_path / "foxes.jsonl"
    foxes.write_text(json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 400}) + "\n")
    patterns = {"library": r"= \d+  # ", str(books): r"word\d+ word\d+", str(foxes): "brown fox"}
    for others in ([], [str(books)], [str(books), str(foxes)]):
        sources = [{"name": other, "weight": 0.001} for other in others] + [{"name": RECALL, "weight": 1000}]
        found = sequences(tokenizer, 1024, 12, source=sources)
        text = tokenizer.decode([token for ids in found for token in ids])
        assert {kind for kind in patterns if re.search(patterns[kind], text)} == set(others or ["library"])


@given(st.text("ab-.\t \x0b\r\x85\xa0é", max_size=2 * LINE_WIDTH))
def test_lines_are_those_of_textwrap(text: str) -> None:
    class OneDocument:
        def documents(self) -> list[Document]:
            return [Document("one", text)]

    table: Any = OneDocument()
    expected = []
    for line in text.splitlines():
        expected += textwrap.wrap(line, LINE_WIDTH, expand_tabs=False, replace_whitespace=False)
    assert [*lines_of(table)] == expected


def test_recall_documents_take_the_first_lines_of_texts_without_an_end(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "MAX_LINES", 100)
    read = Counter[str]()

    def endless(name: str) -> Table:
        def rows(columns: Sequence[str], seed: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
            for number in range(1000):
                read[name] += 1
                yield name, {"text": f"{name} {number}\n\n"}

        return Table(Source(name=name), rows, {})

    stream = packing.Stream(
        table=find_table(Source(name=RECALL)),
        data=Data(source=RECALL),
        tokenizer=tokenizer,
        length=256,
        counts=Counter(),
        texts=[endless("a"), endless("b")],
    )
    next(stream.rows())
    assert read == {"a": 50, "b": 50}


def test_short_documents_are_left_out_and_counted(tokenizer: Any, books: Path) -> None:
    fewest = min(tokens_in(tokenizer, books))
    for least, left_out in ((fewest, 0), (fewest + 1, 1)):
        found = prepared(tokenizer, 128, 80, source=str(books), min_document_tokens=least, epochs=3)
        text = tokenizer.decode([token for row in found.rows for token in row["input_ids"]])
        assert ("book 0" in text) == (not left_out)
        assert found.messages[1:] == [f"documents of under {least} tokens left out: 1"] * left_out
    with refused(DataError, f"data.source: {books}: ", "0 sequences", "100000 tokens left out"):
        sequences(tokenizer, 128, 10, source=str(books), min_document_tokens=100000)


def test_documents_are_reshuffled_every_epoch(tokenizer: Any, books: Path) -> None:
    number = sum(tokens_in(tokenizer, books)) * 3 // 128
    found = sequences(tokenizer, 128, number, source=str(books), epochs=3)
    order = re.findall(r"book (\d+):", tokenizer.decode([token for ids in found for token in ids]))
    epochs = [order[start : start + 12] for start in (0, 12, 24)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(map(str, range(12)))
    assert epochs[0] != epochs[1]
    assert epochs[1] != epochs[2]


def test_every_setting_of_the_sequences_changes_the_cache_key(tokenizer: Any, books: Path) -> None:
    variants: list[dict[str, object]] = [
        {},
        {"seed": 1},
        {"positions": "pose"},
        {"positions": "pose", "sequence_tokens": 24},
        {"packing": "isolated"},
        {"min_document_tokens": 50},
        {"epochs": 2},
        {"source": [{"name": str(books), "weight": 1}, {"name": STDLIB, "weight": 2}]},
    ]
    for target, number in ((128, 4), (128, 5), (96, 4)):
        for variant in variants:
            sequences(tokenizer, target, number, **{"source": str(books), **variant})
    assert cache_entries() == 3 * len(variants)
    (books / "0.txt").write_text("rewritten")
    for _ in range(2):
        sequences(tokenizer, 128, 4, source=str(books))
        assert cache_entries() == 3 * len(variants) + 1


def wrapped(documents: list[list[int]], length: int, prefix: Sequence[int] = ()) -> list[list[int]]:
    """The sequences of documents, each a list of tokens."""
    labelled = [Labelled(ids, [True] * len(ids)) for ids in documents]
    return [[*itertools.chain.from_iterable(part.ids for part in parts)] for parts in cut(labelled, length, prefix)]


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 12))
def test_packing_drops_only_the_last_partial_sequence(lengths: list[int], length: int) -> None:
    flat = iter(range(sum(lengths)))
    found = wrapped([list(itertools.islice(flat, tokens)) for tokens in lengths], length)
    assert [len(sequence) for sequence in found] == [length] * (sum(lengths) // length)
    assert list(itertools.chain.from_iterable(found)) == list(range(len(found) * length))


def test_packed_sequences_begin_with_all_tokens_that_the_tokenizer_adds() -> None:
    documents = [[8, 9, *range(10, 15)], [8, 9, *range(15, 18)], [8, 9, *range(18, 26)]]
    assert wrapped(documents, 6, prefix=[8, 9]) == [
        [8, 9, 10, 11, 12, 13],
        [8, 9, 14, 8, 9, 15],
        [8, 9, 16, 17, 8, 9],
        [8, 9, 18, 19, 20, 21],
        [8, 9, 22, 23, 24, 25],
    ]


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(2, 12))
def test_packed_sequences_begin_with_bos_and_lose_no_token(lengths: list[int], length: int) -> None:
    tokens = itertools.count(1)
    documents = [[0, *itertools.islice(tokens, number)] for number in lengths]
    found = wrapped(documents, length, prefix=[0])
    assert all(sequence[0] == 0 and len(sequence) == length for sequence in found)
    text = [token for sequence in found for token in sequence if token]
    assert text == list(range(1, len(text) + 1))
    starts = {document[1] for document in documents if document[1:]}
    for sequence in found:
        for before, token in itertools.pairwise(sequence[1:]):
            assert (before == 0) == (token in starts) or token == 0


@pytest.mark.parametrize("keys", [{}, {"positions": "pose", "sequence_tokens": 24}, {"source": "builtin:recall"}])
def test_every_packed_sequence_begins_with_bos(tokenizer: Any, books: Path, keys: dict[str, Any]) -> None:
    found = sequences(tokenizer, 128, 40, **{"source": str(books), **keys})
    assert {ids[0] for ids in found} == {tokenizer.bos_token_id}


@given(st.integers(2, 64), st.integers(0, 500), st.integers(2, 8), st.integers(0, 10**6))
def test_pose_positions_increase_below_the_target_and_skip_between_chunks(
    original: int, further: int, chunks: int, seed: int
) -> None:
    chunks = min(chunks, original)
    positions = pose_positions(random.Random(seed), original, original + further, chunks)
    assert len(positions) == original
    assert positions[0] == 0
    assert all(before < after for before, after in itertools.pairwise(positions))
    assert positions[-1] < original + further
    assert sum(after - before > 1 for before, after in itertools.pairwise(positions)) <= chunks - 1


def test_pose_skips_are_uniform() -> None:
    rng = random.Random(0)
    biases = [pose_positions(rng, 32, 132, 2)[-1] - 31 for _ in range(20000)]
    assert abs(sum(biases) / len(biases) - 50) < 1
    assert 150 < biases.count(0) < 250
    assert 150 < biases.count(100) < 250


def test_isolated_documents_are_those_of_wrapped_sequences(tokenizer: Any, books: Path) -> None:
    """The tokens are equal; sequences tell where a document begins, and each begins with BOS."""
    for source in (str(books), RECALL):
        rows = prepared(tokenizer, 128, 30, source=source, packing="isolated", epochs=2).rows
        assert [row["input_ids"].tolist() for row in rows] == sequences(tokenizer, 128, 30, source=source, epochs=2)
        parts = [part.tolist() for row in rows for part in row["input_ids"].split(row["lengths"].tolist())]
        assert len(parts) > 30
        assert all(part[0] == tokenizer.bos_token_id for part in parts)
        assert all(part.index(tokenizer.eos_token_id) == len(part) - 1 for part in parts if 1 in part)


def chats_of(*lengths: int) -> list[Labelled]:
    return [Labelled([0] * length, []) for length in lengths]


def lengths_in(sequences: Iterable[list[Labelled]]) -> list[list[int]]:
    return [[len(chat.ids) for chat in sequence] for sequence in sequences]


def test_a_chat_fills_a_sequence_to_its_last_token() -> None:
    assert lengths_in(packed(chats_of(5, 4, 6, 4, 9), 9)) == [[5, 4], [6], [4], [9]]
    # The oldest sequence is closed for a further one, though there would be room for a short chat.
    full = [8] * (OPEN_SEQUENCES + 1)
    assert lengths_in(packed(chats_of(*full, 1), 9)) == [[8], [8, 1], *([[8]] * (OPEN_SEQUENCES - 1))]


def test_chats_are_grouped_as_long_as_their_padding_has_room() -> None:
    groups = lengths_in(grouped(iter(chats_of(3, 3, 2, 4)), 8, random.Random(0)))
    assert sorted(groups) == [[2, 3], [3, 4]]
    assert sorted(lengths_in(grouped(iter(chats_of(3, 3, 2, 4)), 9, random.Random(0)))) == [[2, 3, 3], [4]]


def test_every_sequence_that_a_text_fills_can_be_trained_on(tokenizer: Any, books: Path) -> None:
    """Sequences of which none begins with a document have BOS in addition; here there is one document."""
    text = books / "11.txt"
    tokens = len(tokenizer(text.read_text())["input_ids"]) + 1
    # The first one has the document's own BOS, and each of the others one of its own.
    most = 1 + (tokens - 32) // 31
    number, steps = f"{most} sequences of 32 tokens", f"{most + 1} are needed"
    with refused(DataError, f"data.source: {text}: ", number, "data.epochs: 1", steps, "training.steps"):
        sequences(tokenizer, 32, most + 1, source=str(text))
    assert cache_entries() == 0
    assert len(sequences(tokenizer, 32, most, source=str(text))) == most
