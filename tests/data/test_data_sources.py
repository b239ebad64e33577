import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi_lora.data.examples import data_problems
from pi_lora.data.sources import NamedRow, evaluation_documents, find_corpus, shuffled
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Source


def texts(source: str | Path, column: str = "text", seed: int | None = None) -> list[str]:
    return [document.text for document in find_corpus(Source(name=str(source), column=column)).documents(seed)]


def write_jsonl(file: Path, rows: list[object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A folder with a document of every kind, in alphabetical order."""
    folder = tmp_path / "shelf"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "a.md").write_text("one")
    write_jsonl(folder / "b.jsonl", [{"text": "two"}, {"text": "three"}])
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "four"}\n\n{"text": null}\n'))
    pq.write_table(pa.table({"n": [1, 2], "text": ["five", "six"]}), folder / "d.parquet")
    (folder / "deep" / "er" / "e.TXT").write_text("seven")
    (folder / "empty.txt").write_text("  \n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def test_a_folder_gives_the_documents_of_every_kind(shelf: Path) -> None:
    assert texts(shelf) == ["one", "two", "three", "four", "five", "six", "seven"]


def test_globs_files_and_the_home_folder(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(shelf.parent))
    monkeypatch.chdir(shelf.parent)
    assert texts("shelf/**/*.TXT") == ["seven"]
    assert texts("shelf/[ab].*") == ["one", "two", "three"]
    assert texts("~/shelf/d.parquet") == ["five", "six"]
    (shelf / "notes").write_text("a named file may have any suffix")
    assert texts("./shelf/notes") == ["a named file may have any suffix"]


def test_the_seeded_order_is_a_shuffle_of_files_and_rows(tmp_path: Path) -> None:
    for index in range(20):
        write_jsonl(tmp_path / f"{index:02}.jsonl", [{"text": f"{index} {row}"} for row in range(20)])
    fixed, first, second = (texts(tmp_path, seed=seed) for seed in (None, 1, 2))
    assert sorted(fixed) == sorted(first) == sorted(second)
    assert first == texts(tmp_path, seed=1)
    assert first not in (second, fixed)
    assert [text.split()[0] for text in first[::20]] != [text.split()[0] for text in fixed[::20]]
    assert [text.split()[1] for text in first[:20]] != [str(row) for row in range(20)]


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 3), st.integers(0, 60))
def test_the_shuffle_buffer_loses_nothing_and_holds_no_more_than_it_may(sizes: list[int], seed: int, room: int) -> None:
    lines = [chr(ord("A") + number) * size for number, size in enumerate(sizes)]
    given_back: list[str] = []
    held = 0

    def source() -> Iterator[NamedRow]:
        nonlocal held
        for line in lines:
            assert held <= room
            held += len(line)
            yield "", {"text": line}

    for _, row in shuffled(source(), seed, room):
        held -= len(row["text"])
        given_back.append(row["text"])
    assert sorted(given_back) == sorted(lines)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "no such file or folder"),
        ("empty.txt", b" \n", "holds no text"),
        ("latin.txt", b"\xff\xfe\x00", r"cannot be read \('utf-8' codec"),
        ("broken.jsonl", b'{"text": "a"}\n\n{"text": \n', r"jsonl:2: cannot be read \(Expecting value"),
        ("list.jsonl", b'["a"]\n', r"jsonl:1: cannot be read \(it is not one value for each column\)"),
        ("column.jsonl", b'{"body": "a", "n": 1}\n', "jsonl:1: has no column text; .*: body, n$"),
        ("number.jsonl", b'{"text": 3}\n', "jsonl:1: column text holds int, not text"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-12], "cannot be read"),
        ("broken.parquet", b"PAR1", "cannot be read"),
        ("none.jsonl", b"", "holds no text"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as refused:
        list(evaluation_documents(str(tmp_path / name)))
    assert str(refused.value).startswith(str(tmp_path / name))
    assert "\n" not in str(refused.value)


def test_all_problems_of_the_sources_are_told_and_the_hub_is_left_alone(shelf: Path, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"body": "a"}])
    sources = [
        {"name": str(shelf)},
        {"name": str(rows)},
        "gone.txt",
        "builtin:pile",
        "builtin:stdlib",
        {"name": "owner/name", "subset": "en", "streaming": True},
    ]
    problems = data_problems(Data.model_validate({"source": sources}))
    assert [problem.split(": ", 2)[:2] for problem in problems] == [
        ["data.source", f"{rows}:1"],
        ["data.source", "gone.txt"],
        ["data.source", "builtin:pile"],
    ]
