"""Rows and documents of files, of the standard library, and of the hub, here a folder laid out like a repository there;
and the text that training leaves out.
"""

import bz2
import gzip
import hashlib
import json
import lzma
import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from conftest import refused
from hub import Hub, forget_commits
from pi_lora.data.checks import data_problems
from pi_lora.data.documents import NamedJson
from pi_lora.data.sources import (
    SHUFFLED_ROWS,
    STDLIB,
    evaluation_documents,
    find_table,
    hash_to_unit,
    held_out_share,
    held_out_text,
    hub_dataset,
    hub_file,
    share_to_hold_out,
    shuffled,
    split_of,
    trains_on,
)
from pi_lora.errors import DataError
from pi_lora.recipe.data import RECALL, Data, Source
from pi_lora.recipe.evaluation import PerplexityOptions

ROWS = 200
CARD = """---
configs:
- {config_name: en, data_files: [{split: train, path: "en/train-*.parquet"}, {split: test, path: "en/test-*.parquet"}]}
- {config_name: de, data_files: [{split: train, path: "de/*.parquet"}]}
---
"""


def texts(source: str | Path, column: str = "text", seed: int | None = None) -> list[str]:
    return [document.text for document in find_table(Source(name=str(source), column=column)).documents(seed)]


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


def test_a_folder_gives_the_documents_of_every_file_format(shelf: Path) -> None:
    assert texts(shelf) == ["one", "two", "three", "four", "five", "six", "seven"]


@pytest.mark.parametrize(("value", "kind"), [(1.5, "float"), (["a"], "list")])
def test_what_a_column_without_text_holds_is_named(tmp_path: Path, value: object, kind: str) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": value}])
    with refused(DataError, f"{rows}:1: holds {kind}", "no text in column text"):
        texts(rows)
    with refused(DataError, f"{rows}:1: has", "column body"):
        texts(rows, column="body")


@pytest.mark.parametrize("name", ["eval/validation.jsonl", "train_eval.jsonl", "training/dev.jsonl", "valuation.csv"])
def test_a_file_is_of_the_last_split_that_its_name_has(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"text": "a"}\n' if name.endswith("jsonl") else "text\na\n")
    (tmp_path / "Evaluation.md").write_text("b")
    assert sorted(texts(tmp_path)) == ["a", "b"]


def test_what_a_folder_of_rows_holds_about_them_is_not_read(tmp_path: Path) -> None:
    """A licence and the script of a clone would train; in a folder of texts they are texts."""
    about = ("LICENSE.md", "license.txt", "README-de.md", "books.py")
    for name in (*about, "notes.md"):
        (tmp_path / name).write_text(name)
    assert sorted(texts(tmp_path)) == sorted([*about, "notes.md"])
    write_jsonl(tmp_path / "rows.jsonl", [{"text": "a row"}])
    write_jsonl(tmp_path / "citation-1.jsonl", [{"text": "another"}])
    assert sorted(texts(tmp_path)) == ["a row", "another", "notes.md"]


@pytest.mark.parametrize("change", ["map", "save again"])
def test_of_a_saved_data_set_only_its_own_files_are_read(tmp_path: Path, change: str) -> None:
    """`datasets` leaves the results of `map` and the shards of an older version beside them."""
    saved = datasets.Dataset.from_list([{"text": f"text {number}"} for number in range(6)])
    saved.save_to_disk(tmp_path, num_shards=3)
    if change == "map":
        datasets.load_from_disk(tmp_path).map(lambda row: {"text": row["text"].upper()})
    else:
        saved.save_to_disk(tmp_path)
    assert len(list(tmp_path.glob("*.arrow"))) > 3
    expected = [f"text {number}" for number in range(6)]
    assert texts(tmp_path) == texts(tmp_path / "*.arrow") == expected


@pytest.mark.parametrize(
    ("first", "second", "splits"),
    [
        ("train", "eval", "train, validation"),
        ("train", "evaluation", "train, validation"),
        ("training", "testing", "test, train"),
        ("Train", "Test", "test, train"),
        ("train-00000-of-00001", "test-00000-of-00001", "test, train"),
    ],
)
def test_a_folder_with_rows_of_several_splits_is_refused(tmp_path: Path, first: str, second: str, splits: str) -> None:
    """Rows to test on would train. The split is in the name of a folder or file."""
    (tmp_path / "data" / first).mkdir(parents=True)
    write_jsonl(tmp_path / "data" / first / "rows.jsonl", [{"text": first}])
    write_jsonl(tmp_path / "data" / first / f"{first}-0.jsonl", [{"text": "more"}])
    other = write_jsonl(tmp_path / "data" / f"{second}.jsonl", [{"text": second}])
    with refused(DataError, f"{tmp_path}: ", f"splits {splits}"):
        texts(tmp_path)
    assert texts(tmp_path / "data" / "*.jsonl") == [second]
    other.unlink()
    assert sorted(texts(tmp_path)) == sorted([first, "more"])


def test_a_file_of_arrow_is_read_like_a_stream(tmp_path: Path) -> None:
    rows = pa.table({"text": ["one", "two"]})
    for new, file in ((pa.ipc.new_file, tmp_path / "a.arrow"), (pa.ipc.new_stream, tmp_path / "b.arrow")):
        with new(file, rows.schema) as out:
            out.write_table(rows)
        assert texts(file) == ["one", "two"]


def test_a_folder_of_rows_is_read_without_its_card_and_hidden_files(tmp_path: Path) -> None:
    """As `datasets` saves one, or `hf download` writes it."""
    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])}).save_to_disk(folder)
    (folder / "README.md").write_text("# Texts")
    (folder / "._b.jsonl").write_bytes(b"\0\5\x16\7")
    (folder / ".ipynb_checkpoints").mkdir()
    write_jsonl(folder / ".ipynb_checkpoints" / "b-checkpoint.jsonl", [{"text": "hidden"}])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_jsonl(elsewhere / "b.jsonl", [{"text": "three"}])
    (folder / "link").symlink_to(elsewhere)
    assert texts(folder) == ["three", "one", "two"]
    assert texts(elsewhere.parent / "*" / "**" / "*.arrow") == ["one", "two"]


def test_files_about_rows_are_of_no_split(tmp_path: Path) -> None:
    for split, name, row in (("train", "rows.jsonl", '{"text": "a"}'), ("test", "dataset_info.json", "{}")):
        (tmp_path / split).mkdir()
        (tmp_path / split / name).write_text(row)
    assert texts(tmp_path) == ["a"]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "twice.parquet")
    (tmp_path / "twice.csv").write_text("text,text\na,b\n")
    for name in ("twice.parquet", "twice.csv"):
        with refused(DataError, f"{tmp_path / name}:1: ", "name text"):
            texts(tmp_path / name)


def test_a_glob_of_other_kinds_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with refused(DataError, f"{tmp_path}/*: ", ".txt"):
        find_table(Source(name=f"{tmp_path}/*"))


ROWS_OF_TABLES = [{"n": "1", "text": "one, é"}, {"n": "2", "text": "two"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS_OF_TABLES)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.json", json.dumps(ROWS_OF_TABLES, indent=1)),
        ("lines.json", LINES),
        ("array.jsonl", " " + json.dumps(ROWS_OF_TABLES)),
        ("rows.ndjson", LINES),
        ("rows.tsv", "n\ttext\n1\tone, é\n2\ttwo\n"),
        ("rows.csv", 'n,text\n1,"one, é"\n2,two\n'),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tables_of_every_kind_and_encoding_are_read_by_their_columns(
    tmp_path: Path, name: str, content: str, encoding: str
) -> None:
    (tmp_path / name).write_text(content, encoding=encoding)
    for source in (tmp_path / name, tmp_path):
        assert texts(source) == ["one, é", "two"]


def zstd(content: bytes) -> bytes:
    """Compress in two frames, as parallel compressors do."""
    half = len(content) // 2
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (content[:half], content[half:]))


def two_members(compress: Callable[[bytes], bytes], content: bytes) -> bytes:
    return compress(content[:9]) + compress(content[9:])


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gz": partial(two_members, gzip.compress),
    "bz2": partial(two_members, bz2.compress),
    "xz": partial(two_members, lzma.compress),
    "zst": zstd,
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compressed_files_are_read_to_their_end(tmp_path: Path, compression: str) -> None:
    compress = COMPRESSIONS[compression]
    (tmp_path / f"a.jsonl.{compression}").write_bytes(compress(LINES.encode()))
    (tmp_path / f"b.CSV.{compression.upper()}").write_bytes(compress(b'n,text\n1,"three"\n'))
    (tmp_path / f"c.txt.{compression}").write_bytes(compress("four é".encode("utf-16")))
    assert texts(tmp_path) == ["one, é", "two", "three", "four é"]


@pytest.mark.parametrize("number", [1, 3])
def test_objects_over_several_lines_are_rows(tmp_path: Path, number: int) -> None:
    """A pretty-printed object was called broken."""
    file = tmp_path / "rows.json"
    file.write_text("\n".join(json.dumps({"text": f"a lamp {n}"}, indent=2) for n in range(number)) + "\n")
    assert texts(file) == [f"a lamp {n}" for n in range(number)]
    file.write_text(file.read_text() + "{")
    with refused(DataError, f"{file}:{number + 1}: "):
        texts(file)


def test_globs_single_files_and_the_home_folder_are_sources(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(shelf.parent))
    monkeypatch.chdir(shelf.parent)
    assert texts("shelf/**/*.TXT") == ["seven"]
    assert texts("shelf/[ab].*") == ["one", "two", "three"]
    assert texts("~/shelf/d.parquet") == ["five", "six"]
    (shelf / "notes").write_text("a named file may have any suffix")
    assert texts("./shelf/notes") == ["a named file may have any suffix"]


def test_names_that_are_not_utf_8_are_names_of_files(tmp_path: Path) -> None:
    """As archives of old systems have them: here in Latin-1."""
    for name in (b"caf\xe9.txt", b"th\xe9.txt"):
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_text(os.fsdecode(name[:2]))
    table = find_table(Source(name=str(tmp_path), hold_out=0.5))
    training, held_out = ([document.text for document in table.documents(held_out=part)] for part in (False, True))
    assert sorted(training + held_out) == ["ca", "th"]


def test_the_seeded_order_is_a_shuffle_of_files_and_rows(tmp_path: Path) -> None:
    for index in range(20):
        write_jsonl(tmp_path / f"{index:02}.jsonl", [{"text": f"{index} {row}"} for row in range(20)])
    fixed, first, second = (texts(tmp_path, seed=seed) for seed in (None, 1, 2))
    assert sorted(fixed) == sorted(first)
    assert first == texts(tmp_path, seed=1) != second
    files, rows = zip(*(text.split() for text in first), strict=True)
    assert sorted(files[::20]) != list(files[::20]) != [str(index) for index in range(20)]
    assert list(rows[:20]) != [str(row) for row in range(20)]


def test_the_shuffle_loses_no_row_and_buffers_few() -> None:
    number_of_rows = 3 * SHUFFLED_ROWS
    read = 0

    def rows() -> Iterator[NamedJson]:
        nonlocal read
        for read in range(number_of_rows):
            yield "", {"text": read}

    given_back = []
    for number, (_, row) in enumerate(shuffled(rows(), 3)):
        assert read <= number + SHUFFLED_ROWS
        given_back.append(row["text"])
    assert sorted(given_back) == list(range(number_of_rows))
    assert given_back[:20] != list(range(20))


@pytest.mark.parametrize(
    ("name", "content", "row", "said"),
    [
        ("gone.txt", None, "", "no such file"),
        ("empty.txt", b" \n", "", "holds no text"),
        ("latin.txt", "café".encode("latin-1"), "", "utf-8"),
        ("cut.txt", b"\xff\xfe\x00", "", "utf-16-le"),
        ("unmarked.txt", "Some text.".encode("utf-16-le"), "", "byte order mark"),
        ("wide.txt", "Some text.".encode("utf-32"), "", "byte order mark"),
        ("page.html", b"<p>Some text.</p>", "", ".txt"),
        ("pages.zip", b"PK", "", ".txt"),
        ("latin.jsonl", '{"text": "a"}\n{"text": "café"}\n'.encode("latin-1"), ":2", "utf-8"),
        ("half.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}\n', ":2", "surrogates"),
        ("half.json", b'[{"text": "a"}, {"text": "\\ud83d"}]', ":2", "surrogates"),
        ("latin.tsv", "n\ttext\n1\ta\n2\tcafé\n".encode("latin-1"), ":2", "utf-8"),
        ("object.json", b'{"data": [{"text": "a"}]}', ":1", "columns: data"),
        ("open.json", b'[{"text": "a"}', ":1", "cannot be read"),
        ("cut.jsonl.zst", zstd(b'{"text": "a"}\n' * 99)[:-5], ":1", "cannot be read"),
        ("cut.txt.xz", lzma.compress(b"Some text." * 99)[:-12], "", "cannot be read"),
        ("broken.jsonl", b'{"text": "a"}\n\n{"text": \n', ":2", "cannot be read"),
        ("list.jsonl", b'["a"]\n', ":1", "one value for each column"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-12], ":1", "cannot be read"),
        ("broken.parquet", b"PAR1", ":1", "cannot be read"),
        ("none.jsonl", b"", "", "holds no text"),
        ("wide.csv", b"text,n\na,b,c\n", ":1", "one value for each column"),
        ("short.csv", b"n,text\n\n1,a\n2\n", ":2", "one value for each column"),
        ("open.csv", b'text,n\n"a,b\n', ":1", "cannot be read"),
    ],
)
def test_a_file_that_is_not_text_is_refused(
    tmp_path: Path, name: str, content: bytes | None, row: str, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with refused(DataError, f"{tmp_path / name}{row}: ", said):
        list(evaluation_documents(PerplexityOptions(data=str(tmp_path / name))))


def test_all_problems_of_sources_are_reported_without_asking_the_hub(shelf: Path, tmp_path: Path, hub: Hub) -> None:
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
    assert hub.log == []


BOOKS = "owner/books"


@pytest.fixture
def commit(hub: Hub, tmp_path: Path) -> str:
    """The commit of `owner/books` on the hub."""
    folder = tmp_path / "repository"
    for part in ("en", "de"):
        (folder / part).mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    for shard in range(4):
        rows = [f"en {shard} {row}" for row in range(ROWS // 4)]
        pq.write_table(pa.table({"content": rows, "n": range(len(rows))}), folder / f"en/train-{shard:05}.parquet")
    pq.write_table(pa.table({"content": ["test"], "n": [0]}), folder / "en/test-00000.parquet")
    pq.write_table(pa.table({"content": ["deutsch"], "n": [0]}), folder / "de/train.parquet")
    return hub.add(f"datasets/{BOOKS}", folder)


def read(seed: int | None = None, **fields: object) -> list[str]:
    source = Source.model_validate({"name": BOOKS, "column": "content", "subset": "en", **fields})
    return [document.text for document in hub_dataset(source).documents(seed)]


@pytest.mark.parametrize("streaming", [False, True])
def test_subset_split_and_column_select_the_texts_of_a_data_set(commit: str, streaming: bool) -> None:
    rows = read(streaming=streaming)
    assert rows[:2] == ["en 0 0", "en 0 1"]
    source = Source(name=BOOKS, subset="en", streaming=streaming)
    assert hub_dataset(source).identity == {"commit": commit}
    assert len(rows) == ROWS
    assert read(split="test", streaming=streaming) == ["test"]
    assert read(subset="de", streaming=streaming) == ["deutsch"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.usefixtures("commit")
def test_the_seeded_order_is_a_shuffle_of_all_rows(streaming: bool) -> None:
    fixed, first, second = (read(seed, streaming=streaming) for seed in (None, 1, 2))
    assert sorted(first) == sorted(second) == sorted(fixed)
    assert first == read(1, streaming=streaming)
    assert first not in (second, fixed)
    assert {row.split()[1] for row in first[:20]} != {"0"}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("key", "name", "where"), [("column", "n", f"{BOOKS}:1: "), ("split", "validation", f"{BOOKS}: ")]
)
@pytest.mark.usefixtures("commit")
def test_a_missing_split_or_column_is_named(streaming: bool, key: str, name: str, where: str) -> None:
    with refused(DataError, where, key, name):
        read(streaming=streaming, **{key: name})


def test_a_hub_file_is_identified_by_the_downloaded_commit(hub: Hub) -> None:
    """A branch moves, and what was made from its former commit must not be taken for what is there now."""
    for text in ("one", "two"):
        commit = hub.add("datasets/owner/books", {"data/x.jsonl": f'{{"text": "{text}"}}'.encode()})
        forget_commits()
        table = hub_file(Source(name=BOOKS), "data/x.jsonl")
        assert table.identity == {"commit": commit}
        assert [document.text for document in table.documents()] == [text]
    with refused(DataError, f"{BOOKS}: ", "data/y.jsonl"):
        hub_file(Source(name=BOOKS), "data/y.jsonl")


def on_disk(commit: str, texts: list[str], cache: Path) -> None:
    """What `datasets` keeps of owner/books when it has downloaded a commit."""
    folder = cache / "owner___books" / "default" / "0.0.0" / commit
    folder.mkdir(parents=True)
    rows = pa.table({"text": texts})
    with pa.ipc.new_stream(folder / "books-train.arrow", rows.schema) as out:
        out.write_table(rows)
    features = datasets.Features.from_arrow_schema(rows.schema).to_dict()
    splits = {"train": {"name": "train", "num_bytes": 1, "num_examples": len(texts), "dataset_name": "books"}}
    info = {"config_name": "default", "dataset_name": "books", "features": features, "splits": splits}
    (folder / "dataset_info.json").write_text(json.dumps({**info, "version": {"version_str": "0.0.0"}}))


def test_offline_a_name_is_the_commit_that_the_hub_named_last(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of another commit `datasets` would give the rows that it downloaded last."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    first, second = "1" * 40, "2" * 40
    refs = Path(constants.HF_HUB_CACHE) / "datasets--owner--books" / "refs"
    refs.mkdir(parents=True)
    for name, commit in (("v1", first), ("main", second)):
        (refs / name).write_text(commit)

    def rows(revision: str) -> tuple[object, list[str]]:
        table = hub_dataset(Source(name=BOOKS, revision=revision, streaming=True))
        return table.identity["commit"], [each.text for each in table.documents()]

    on_disk(first, ["one"], tmp_path / "datasets")
    assert rows("v1") == rows(first) == (first, ["one"])
    with refused(DataError, f"{BOOKS}: ", "revision main", first):
        rows("main")
    on_disk(second, ["two"], tmp_path / "datasets")
    assert rows("main") == rows(second) == (second, ["two"])
    assert hub.log == []


def parts(source: Source, seed: int | None = None) -> tuple[list[str], list[str]]:
    """The texts that train, and those that are measured as `held_out_text` says."""
    measured = evaluation_documents(PerplexityOptions.model_validate(held_out_text(source)))
    return [each.text for each in find_table(source).documents(seed)], [each.text for each in measured]


def write_texts(folder: Path, kind: str) -> list[str]:
    written = [f"text {number}\n" * 20 for number in range(2 if kind == "two files" else 40)]
    if kind == "rows":
        write_jsonl(folder / "rows.jsonl", [{"text": text} for text in written])
    else:
        for number, text in enumerate(written):
            (folder / f"{number}.txt").write_text(text)
    return written


@pytest.mark.parametrize(
    ("kind", "share", "numbers"),
    [
        ("files", 0.2, {8}),
        ("files", 0.06, {2}),
        ("two files", 0.1, {1}),
        ("rows", 0.2, range(1, 17)),
    ],
)
def test_training_and_held_out_documents_are_disjoint_in_every_order(
    tmp_path: Path, kind: str, share: float, numbers: Collection[int]
) -> None:
    """The share of files is rounded, to at least one of several."""
    written = write_texts(tmp_path, kind)
    trained, measured = parts(Source(name=str(tmp_path), hold_out=share))
    assert sorted(trained + measured) == sorted(written)
    assert len(measured) in numbers
    shuffled, again = parts(Source(name=str(tmp_path), hold_out=share), seed=3)
    assert (sorted(shuffled), again) == (sorted(trained), measured)
    assert shuffled != trained or kind == "two files"


def test_files_are_held_out_by_name_in_any_folder(tmp_path: Path) -> None:
    held = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        write_texts(tmp_path / place, "files")
        held.append(parts(Source(name=str(tmp_path / place), hold_out=0.1))[1])
    assert held[0] == held[1]


def test_splits_of_the_standard_library_are_disjoint_and_complete() -> None:
    train, validation, test = (
        {each.name for each in find_table(Source(name=STDLIB, split=split)).documents()}
        for split in ("train", "validation", "test")
    )
    library = train | validation | test
    assert len(library) == len(train) + len(validation) + len(test)
    assert not [name for name in library if "site-packages" in name or "/test/" in name]
    assert 300 < 0.8 * len(library) < len(train) < 0.95 * len(library)
    assert {document.name for document in evaluation_documents(PerplexityOptions(split="validation"))} == validation
    with refused(DataError, f"{RECALL}: ", "training"):
        evaluation_documents(PerplexityOptions(data=RECALL))
    # By the name alone. The settings of the demo were chosen by these, and by none of those.
    assert {split_of(f"{name}.py") for name in ("bz2", "calendar", "chunk")} == {"validation"}
    assert {split_of(f"{name}.py") for name in ("enum", "html/parser", "json/encoder")} == {"test"}


def test_rows_are_held_out_by_their_digest(tmp_path: Path) -> None:
    """A row of this digest is held out by any share above it, and by no other."""
    written = write_texts(tmp_path, "rows")
    digest = hash_to_unit(written[7])
    assert digest == int(hashlib.sha256(written[7].encode()).hexdigest()[:16], 16) / 2**64
    for share, place in ((digest, 0), (digest * 1.0001, 1)):
        assert written[7] in parts(Source(name=str(tmp_path), hold_out=share))[place]


def test_a_single_text_holds_out_its_end_from_a_line_start_near_the_share(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    title = "A title\n" + "x" * 992
    ends = ("x" * 749 + "\n" + "x" * 250, "x" * 750 + "\n" + "x" * 249)
    lines = ("x" * 19 + "\n") * 50
    for text, trained in (("x" * 1000, 750), (title, 750), (ends[0], 750), (ends[1], 750), (lines, 740)):
        book.write_text(text)
        assert parts(Source(name=str(book), hold_out=0.25)) == ([text[:trained]], [text[trained:]])


def test_the_share_to_hold_out_is_four_windows_and_ten_documents(tmp_path: Path) -> None:
    """Four windows of four bytes a token; between a fiftieth and a fifth."""
    book, rows = tmp_path / "book.txt", tmp_path / "rows.jsonl"
    shares = {}
    for size in (2_000_000, 200_000, 20_000):
        book.write_text("x" * size)
        shares[size] = share_to_hold_out(Source(name=str(book)), 1000)
    assert shares == {2_000_000: 0.02, 200_000: 0.08, 20_000: 0.2}
    write_jsonl(rows, [{"text": f"{number:04}" * 500} for number in range(100)])
    assert share_to_hold_out(Source(name=str(rows)), 100) == 0.1
    (tmp_path / "folder").mkdir()
    for number in range(200):
        (tmp_path / "folder" / f"{number}.txt").write_text("x" * 2000)
    assert share_to_hold_out(Source(name=str(tmp_path / "folder")), 100) == 0.05


def test_texts_that_train_are_known_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    books = tmp_path / "books"
    (books / "old").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "old/c.txt"):
        (books / name).write_text(name)
    (tmp_path / "others.txt").write_text("d")
    monkeypatch.chdir(tmp_path)
    whole = [Source(name="books"), Source(name="owner/data", split="train")]
    in_part = [Source(name="books", hold_out=0.4)]
    same = [Source(name=name, hold_out=0.4) for name in ("books/", "./books", f"{books}", "books/**")]
    for measured in (*same, Source(name="books/old"), Source(name="*/a.txt"), Source(name="owner/data")):
        assert trains_on(whole, measured)
    for measured in (Source(name="others.txt"), Source(name="owner/data", split="test"), Source(name="gone")):
        assert not trains_on(whole, measured)
    for split in ("train[:50%]", "test+train"):
        assert trains_on(whole, Source(name="owner/data", split=split))
        assert trains_on([Source(name="owner/data", split=split)], Source(name="owner/data"))
    assert not any(trains_on(in_part, measured) for measured in same)
    assert [held_out_share(in_part, measured) for measured in same] == [0.4] * 4
    for measured in (Source(name="books"), Source(name="books", hold_out=0.2), Source(name="books/old", hold_out=0.4)):
        assert trains_on(in_part, measured)
    assert held_out_share(in_part, Source(name="books/old")) is None
    other_column = Source(name="books", column="answer", hold_out=0.4)
    assert trains_on(in_part, other_column)
    assert held_out_share(in_part, other_column) is None
