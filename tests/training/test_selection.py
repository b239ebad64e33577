"""Documents that train are chosen by what the base gains from their distant context, or by how well they compress."""

import gzip
import json
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from conftest import BUILTIN, run_command, small_recipe, train
from pi_lora.api import load
from pi_lora.data.batches import TrainingData
from pi_lora.data.documents import Document
from pi_lora.data.selection import selected
from pi_lora.data.sources import find_table
from pi_lora.data.tokens import tokenized
from pi_lora.errors import DataError
from pi_lora.models.resolve import resolve_for_training
from pi_lora.recipe.data import Selection, Source
from pi_lora.recipe.files import dump_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.scaling.extension import Extension
from pi_lora.training import selection as selection_module
from pi_lora.training.job import pack_data
from pi_lora.training.selection import Gains
from pi_lora.types import Json, silent

TARGET = 512
SHORT = 256
NUMBERS = range(3)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """Assignments that come again some 380 tokens further on, or in other places, and a short text."""
    folder = tmp_path / "books"
    folder.mkdir()
    for number in NUMBERS:
        rng = random.Random(number)
        lines = [f"{''.join(rng.choices('abcdefgh', k=6))} = {rng.randrange(10**6)}\n" for _ in range(56)]
        (folder / f"far{number}.txt").write_text("".join(lines[:28]) * 2)
        (folder / f"mixed{number}.txt").write_text("".join(lines))
    (folder / "short.txt").write_text("def f(x):\n    return x\n")
    return folder


def recipe_of(books: Path, by: str = "gain", keep: float = 0.4, **others: object) -> Recipe:
    source = {"name": str(books), "select": {"by": by, "keep": keep}, **others}
    return small_recipe(
        BUILTIN,
        context={"target": TARGET, "original": 256},
        scaling="yarn",
        data={"source": source, "epochs": 3},
        training={"steps": 1, "global_batch_size": 4, "per_device_batch_size": 1},
    )


def packed(recipe: Recipe) -> TrainingData:
    return pack_data(recipe, resolve_for_training(recipe))


def chosen_by(data: TrainingData) -> tuple[str, list[str]]:
    """The line of how many are chosen, and the names of the best and the worst."""
    [line] = [line for line in data.messages if "chosen by" in line]
    named = [Path(line.split(": ")[-1]).stem for line in data.messages if line.endswith(".txt")]
    return line, named


def lines_of(data: TrainingData, recipe: Recipe) -> set[str]:
    """The whole lines of the sequences."""
    tokenizer = resolve_for_training(recipe).tokenizer
    text = "".join(tokenizer.decode(row["input_ids"]) for row in data.rows)
    return set(re.findall(r"(?<=\n)[a-h]{6} = \d+(?=\n)", text))


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The beginnings of the texts that the model has read."""
    read: list[str] = []
    gain = Gains._gain

    def counted(self: Gains, text: str) -> float | None:
        read.append(text)
        return gain(self, text)

    monkeypatch.setattr(Gains, "_gain", counted)
    return read


def test_documents_with_far_repetition_are_chosen(books: Path) -> None:
    data = packed(recipe_of(books))
    line, named = chosen_by(data)
    assert line == f"{books}: 3 of 6 documents chosen by gain"
    assert [name[:3] for name in named] == ["far"] * 3 + ["mix"] * 3
    lines = lines_of(data, recipe_of(books))
    assert len(lines) > 40
    assert lines <= set("".join(path.read_text() for path in books.glob("far*.txt")).splitlines())


def test_the_gain_is_the_mean_over_the_first_whole_windows(books: Path) -> None:
    recipe = recipe_of(books)
    text = (books / "far0.txt").read_text() + (books / "far1.txt").read_text()
    scorer = Gains(recipe, resolve_for_training(recipe), Selection(by="gain", keep=0.5, windows=2))
    model = load(BUILTIN, Extension(target=TARGET, original=256, scaling="yarn"))
    [ids] = tokenized(model.tokenizer, [text])
    assert len(ids) > 2 * TARGET
    gains = []
    with torch.no_grad():
        for start in (0, TARGET):
            window = torch.tensor([[0, *ids[start + 1 : start + TARGET]]])
            far = cross_entropy(model.module(window).logits[0, SHORT - 1 : -1], window[0, SHORT:], reduction="none")
            near = far.clone()
            for first in range(64, SHORT, 64):
                cut = torch.cat([window[:, :1], window[:, first + 1 : first + SHORT + 64]], dim=1)
                losses = cross_entropy(model.module(cut).logits[0, SHORT - 1 : -1], cut[0, SHORT:], reduction="none")
                near[first : first + 64] = losses
            gains += (near - far).tolist()
    expected = pytest.approx(sum(gains) / len(gains), abs=0.01)  # a CPU may compute in bfloat16
    assert scorer.score(Document("far0", text)) == expected
    assert sum(gains) / len(gains) > 0.1


def test_a_document_shorter_than_the_window_is_scored_at_its_length(books: Path) -> None:
    recipe = recipe_of(books)
    scorer = Gains(recipe, resolve_for_training(recipe), Selection(by="gain", keep=0.5))
    text = (books / "far1.txt").read_text()
    assert (scorer.score(Document("", text[:500])) or 0) > 0
    assert scorer.score(Document("", text[:200])) is None


def test_texts_are_scored_once(books: Path, scored: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(books)
    first = packed(recipe)
    assert len(scored) == 7
    # Packed data is read without scores, and packed otherwise with the scores of the cache.
    monkeypatch.setattr(selection_module, "load_base", lambda *_, **__: pytest.fail("loaded again"))
    again = packed(recipe)
    assert again.digest == first.digest
    assert len(again.messages) == 1
    fewer = packed(recipe_of(books, keep=0.1))
    assert chosen_by(fewer) == (f"{books}: 1 of 6 documents chosen by gain", chosen_by(first)[1])
    assert fewer.digest != first.digest
    assert len(scored) == 7


@pytest.mark.parametrize(
    "changes",
    [
        {"scaling": "pi"},
        {"context": {"target": 448, "original": 256}},
        {"tuning": {"method": "qlora"}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_model_or_window_has_other_scores(books: Path, changes: dict[str, object]) -> None:
    def identity_of(recipe: Recipe) -> Json:
        gains = partial(Gains, recipe, resolve_for_training(recipe))
        return dict(selected(find_table(recipe.data.source[0]), gains, [], silent).identity)

    recipe = recipe_of(books)
    other = Recipe.model_validate(recipe.model_dump() | changes)
    assert identity_of(other) != identity_of(recipe) == identity_of(recipe_of(books))
    source = resolve_for_training(recipe)
    first, both = (Gains(recipe, source, Selection(by="gain", keep=0.5, windows=windows)) for windows in (1, 2))
    assert first._folder != both._folder
    fewer = recipe_of(books, keep=0.1)
    assert identity_of(fewer) == identity_of(recipe) | {"keep": 0.1}


def test_an_interrupted_scoring_continues(
    books: Path, scored: list[str], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(books)
    append = selection_module.append_journal

    def interrupted(*line: object) -> None:
        append(*line)  # type: ignore[arg-type]
        if len(scored) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(selection_module, "append_journal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        packed(recipe)
    monkeypatch.setattr(selection_module, "append_journal", append)
    [journal] = cache_folder.glob("gains/*/*.jsonl")
    assert len(journal.read_text().splitlines()) == 5
    chosen = chosen_by(packed(recipe))
    assert len(scored) == len(set(scored)) == 7
    monkeypatch.setenv("PI_LORA_CACHE", str(cache_folder / "empty"))
    assert chosen_by(packed(recipe)) == chosen


@pytest.mark.parametrize("by", ["gain", "gzip"])
def test_held_out_documents_are_neither_scored_nor_chosen(
    books: Path, scored: list[str], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(name=str(books), hold_out=0.3)
    held_out = {document.text for document in find_table(source).documents(held_out=True)}
    training = {document.text for document in find_table(source).documents()}
    compressed = []
    compress = gzip.compress
    monkeypatch.setattr(gzip, "compress", lambda text: compressed.append(text.decode()) or compress(text))
    line, _ = chosen_by(packed(recipe_of(books, by, hold_out=0.3)))
    assert len(held_out) == 2  # the short text among them
    assert set(scored if by == "gain" else compressed) == training
    assert f" of {len(training)} documents" in line


def test_rows_are_chosen_whatever_their_order(books: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    texts = [path.read_text() for path in sorted(books.glob("*.txt"))]
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = packed(recipe_of(rows))
    assert f"{rows}: 3 of 6 documents chosen by gain" in data.messages
    numbers = [int(line.rpartition(":")[2]) for line in data.messages if line.startswith("gain ")]
    assert [number <= 3 for number in numbers] == [True] * 3 + [False] * 3


@pytest.fixture
def by_ratio(tmp_path: Path) -> Iterator[Path]:
    """Ten texts, of which the first compress best."""
    folder = tmp_path / "ratios"
    folder.mkdir()
    rng = random.Random(0)
    for number in range(10):
        letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=200 * (number + 1)))
        (folder / f"{number}.txt").write_text(letters + "a" * (3000 - len(letters)))
    return folder


def test_gzip_keeps_the_middle(by_ratio: Path) -> None:
    recipe = recipe_of(by_ratio, "gzip", 0.6)
    chosen = selected(find_table(recipe.data.source[0]), None, [], silent)
    assert [Path(document.name).stem for document in chosen.documents()] == ["2", "3", "4", "5", "6", "7"]
    named = ["9", "8", "7", "2", "1", "0"]
    assert chosen_by(packed(recipe)) == (f"{by_ratio}: 6 of 10 documents chosen by gzip", named)


def test_documents_without_distant_context_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "short.txt").write_text("too short")
    with pytest.raises(DataError, match=r"notes: no document has distant context; name longer ones"):
        packed(recipe_of(folder))


def test_a_training_scores_before_it_packs(books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of(books)
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    assert run_command("train", str(file), "--dry-run", "--output", str(tmp_path / "run")) == 0
    assert "the base scores the documents before they are packed" in capsys.readouterr().out
    assert not list(tmp_path.glob("cache/gains/*"))
    assert run_command("prepare", str(file)) == 0
    said = capsys.readouterr().out
    assert f"data: {books}: 3 of 6 documents chosen by gain\ndata: gain " in said
    run = train(recipe, tmp_path / "run")
    assert (run / "adapter_model.safetensors").is_file()
