"""Sources of rows with named columns: local files, the hub, and Python's standard library; documents are one column."""

import functools
import hashlib
import json
import os
import random
import sysconfig
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download

from pi_lora.data import documents
from pi_lora.data.documents import DOCUMENT_SUFFIXES, TABLE_SUFFIXES, Document, File, NamedJson
from pi_lora.errors import DataError, first_line
from pi_lora.recipe.schema import CHAT_COLUMNS, Source
from pi_lora.types import Json

STDLIB = "builtin:stdlib"
RECALL = "builtin:recall"
# Tests and vendored packages are not in every installation; code page tables and the compiled help are hardly text.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
HELD_OUT_SHARE = 0.1
# The names before this one are of the validation split: with them the settings of the demo were chosen.
FIRST_OF_TEST = "e"
SHUFFLE_CHARACTERS = 32_000_000
# Its loader is a script, which `datasets` no longer runs; the script reads `SPLIT.jsonl` out of `SUBSET.zip`.
SCROLLS = "tau/scrolls"

# What names a row in a message (`file:line`), and its texts by column.
NamedRow = tuple[str, dict[str, str]]


@dataclass(frozen=True)
class Table:
    """A source of rows. `read` yields the texts in some columns of every row as they are asked for, in a fixed order or
    in that of a seed. `identity` is what decides the rows, as JSON: a cache made from them is stale when it changes.
    `size` is the bytes of its files on this machine, None of what is on the hub. `texts` are the names of its
    files if every file is a text. `part` returns what is read of a named text.
    """

    name: str
    column: str
    read: Callable[[Sequence[str], int | None], Iterator[NamedRow]]
    identity: Callable[[], Json]
    size: int | None = None
    texts: Sequence[str] = ()
    part: Callable[[str, str], str] = lambda name, text: text

    def documents(self, seed: int | None = None) -> Iterator[Document]:
        """Yield the texts of `column` that are not blank, ordered as `read`; raise DataError if there is none."""
        empty = True
        for where, row in self.read([self.column], seed):
            if (text := self.part(where, row[self.column])).strip():
                empty = False
                yield Document(where, text)
        if empty:
            raise DataError(f"{self.name}: holds no text; name a source with text, or change its hold_out")

    def divided(self, share: float, held_out: bool) -> "Table":
        """Return the table without the `share` of its text that is held out, or with nothing else. One text is cut, the
        end is held out. Of several texts at least one is held out, chosen by their file names; of rows those that a
        digest of the text chooses. So the division follows neither the order of the documents nor the machine.
        """

        def part_of_one(name: str, text: str) -> str:
            cut = text.rfind("\n", 0, int(len(text) * (1 - share))) + 1 or int(len(text) * (1 - share))
            return text[cut:] if held_out else text[:cut]

        by_draw = sorted(self.texts, key=lambda name: draw(Path(name).name))
        chosen = set(by_draw[: max(1, round(share * len(by_draw)))])

        def part_of_many(name: str, text: str) -> str:
            is_chosen = name in chosen if chosen else draw(text) < share
            return text if is_chosen == held_out else ""

        return replace(self, part=part_of_one if len(self.texts) == 1 else part_of_many)


def draw(text: str) -> float:
    """Return a number in [0, 1) that follows from `text` alone, the same under every Python."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def texts(rows: Iterable[NamedJson], columns: Sequence[str]) -> Iterator[NamedRow]:
    """Yield `columns` of each row, None as an empty text, chats as JSON; raise DataError where one is absent or is
    neither.
    """
    for where, row in rows:
        for column in columns:
            if column not in row:
                raise DataError(f"{where}: has no column {column}; choose from its columns: {', '.join(row)}")
            kind, wanted = (list, "a list of messages") if column in CHAT_COLUMNS else (str, "text")
            if not isinstance(row[column], kind | None):
                holds = f"{where}: column {column} holds {type(row[column]).__name__}, not {wanted}"
                raise DataError(f"{holds}; name a column of text, or one of chats: {' or '.join(CHAT_COLUMNS)}")
        yield where, {column: _as_text(row[column]) for column in columns}


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str) if value else ""


def characters(row: NamedRow) -> int:
    """Return the length of all texts of a row."""
    return sum(map(len, row[1].values()))


def shuffled(rows: Iterable[NamedRow], seed: int | None, room: int = SHUFFLE_CHARACTERS) -> Iterator[NamedRow]:
    """Shuffle a stream if there is a seed: hold about `room` characters, and yield a random one of the rows held for
    each that comes. A thousand books are a gigabyte and a thousand posts are not, so it is not rows that are counted.
    """
    if seed is None:
        yield from rows
        return
    rng = random.Random(seed)
    held: list[NamedRow] = []
    size = 0
    for row in rows:
        held.append(row)
        size += characters(row)
        while size > room:
            index = rng.randrange(len(held))
            held[index], held[-1] = held[-1], held[index]
            size -= characters(held[-1])
            yield held.pop()
    rng.shuffle(held)
    yield from held


def read_files(files: Mapping[str, File], columns: Sequence[str], seed: int | None) -> Iterator[NamedRow]:
    """Yield the rows of named files, one file at a time; a seed shuffles the files, and the rows of each."""
    order = list(files.items())
    if seed is not None:
        random.Random(seed).shuffle(order)
    for name, file in order:
        yield from shuffled(texts(documents.rows_in(file, name, columns), columns), seed)


def local_files(name: str, files: Mapping[str, Path], column: str = "text") -> Table:
    """Return named files as a table."""
    size = sum(file.stat().st_size for file in files.values())
    decided_by = {"files": len(files), "sha256": documents.fingerprint(files.values())}
    holds_rows = any(file.name.lower().endswith(TABLE_SUFFIXES) for file in files.values())
    named = () if holds_rows else tuple(files)
    return Table(name, column, functools.partial(read_files, files), lambda: decided_by, size, named)


def split_of(relative_path: str) -> str:
    """Return the split of a file, train, validation or test, by its name alone, so the same under every Python."""
    if draw(relative_path) >= HELD_OUT_SHARE:
        return "train"
    return "validation" if relative_path < FIRST_OF_TEST else "test"


def standard_library(split: str = "train") -> Table:
    """Return a split of Python's own sources, train, validation or test: a few megabytes at most."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        # Not entered at all: what is installed beside the library is often a hundred times as much.
        folders[:] = set(folders) - SKIPPED_FOLDERS
        paths += (Path(folder, name) for name in names if name.endswith(".py"))
    named = ((path.relative_to(root).as_posix(), path) for path in sorted(paths) if path.stat().st_size)
    return local_files(STDLIB, {name: path for name, path in named if split_of(name) == split})


def hub_dataset(source: Source) -> Table:
    """Return a split of a hub data set; nothing is fetched before it is read. Rows are named by their number where the
    order is fixed. The seeded order permutes all rows on disk; of a stream the files, several of which are read in
    turns.
    """
    name, revision, streaming = source.name, source.revision, source.streaming

    @functools.cache
    def loaded() -> Any:
        # `datasets` takes a second to import, and local text does without.
        from datasets import load_dataset

        with _hub_errors(name):
            return load_dataset(name, source.subset, split=source.split, revision=revision, streaming=streaming)

    def commit() -> str | None:
        if not streaming:
            # In its cache a data set is in a folder with the name of its commit.
            return Path(loaded().cache_files[0]["filename"]).parent.name
        with _hub_errors(name):
            return HfApi().dataset_info(name, revision=revision).sha

    def read(columns: Sequence[str], seed: int | None) -> Iterator[NamedRow]:
        dataset = loaded()
        if seed is not None:
            # A small buffer suffices, since `shuffled` comes after it.
            dataset = dataset.shuffle(seed, **({"buffer_size": 100} if streaming else {}))
        rows = ((f"{name}:{number}" if seed is None else name, row) for number, row in enumerate(dataset, 1))
        yield from shuffled(texts(rows, columns), seed if streaming else None)

    return Table(name, source.column, read, lambda: {"commit": commit()})


def hub_file(name: str, file: str, revision: str, column: str = "text", member: str = "") -> Table:
    """Return one file of a data set on the hub as it was uploaded, or a `member` of a zip archive, so that no script
    runs. Rows are named by where they are on the hub.
    """

    def downloaded() -> Path:
        with _hub_errors(f"{name}/{file}"):
            return Path(hf_hub_download(name, file, repo_type="dataset", revision=revision))

    def read(columns: Sequence[str], seed: int | None) -> Iterator[NamedRow]:
        opened = zipfile.Path(downloaded(), member) if member else downloaded()
        return read_files({f"{name}/{member.removesuffix('.jsonl') or file}": opened}, columns, seed)

    # In the hub's cache a file is in a folder with the name of its commit.
    return Table(name, column, read, lambda: {"commit": downloaded().parents[file.count("/")].name})


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # `datasets` raises a dozen kinds for a user's mistakes: not found, gated, offline, no such split.
        what = f"is neither a file or folder nor a hub data set that can be read ({first_line(error)})"
        advice = "check its name, subset, split and revision, the network, or log in with `hf auth login`"
        raise DataError(f"{name}: {what}; {advice}") from error


def find_table(source: Source, suffixes: tuple[str, ...] = TABLE_SUFFIXES) -> Table:
    """Find the rows that `source` names; raise DataError if they are not there (for the hub, when they are read)."""
    name = source.name
    if name.startswith("builtin:"):
        raise DataError(f"{name}: no such built-in rows; there are {STDLIB} and {RECALL}, and only as text to pack")
    if name == SCROLLS:
        member = f"{source.subset}/{source.split}.jsonl"
        return hub_file(SCROLLS, f"{source.subset}.zip", source.revision, source.column, member)
    if not documents.looks_local(name):
        return hub_dataset(source)
    files = documents.files_named(name, suffixes)
    if suffixes == TABLE_SUFFIXES and not files[0].name.lower().endswith(suffixes):
        raise DataError(f"{name}: holds no rows with columns; name {', '.join(suffixes)} files")
    return local_files(name, {str(file): file for file in files}, source.column)


def find_corpus(source: Source, held_out: bool = False) -> Table:
    """Find the documents that `source` names, as `find_table` does, without those that it holds out, or only those; of
    `builtin:recall` the text between its facts.
    """
    builtin = source.name in (STDLIB, RECALL)
    table = standard_library(source.split) if builtin else find_table(source, DOCUMENT_SUFFIXES)
    return table if source.hold_out is None else table.divided(source.hold_out, held_out)


def share_to_hold_out(source: Source, target: int) -> float:
    """Return the share of `source` that a recipe for windows of `target` tokens (L') holds out: about four windows, a
    fiftieth to a fifth of local text, and a hundredth of what is on the hub.
    """
    size = find_corpus(source).size
    return 0.01 if size is None else round(min(0.2, max(0.02, 16 * target / max(1, size))), 2)


def held_out_text(source: Source) -> Json:
    """Return the keys of `evaluation.perplexity` that measure what `source` holds out."""
    return source.model_dump(include={"column", "subset", "split", "hold_out"}) | {"data": source.name}


# Repository, file and commit. Of PG-19 all 100 books of the test split; `deepmind/pg19` itself needs a script.
# fmt: off
PINNED = {
    "pg19": ("emozilla/pg19-test", "data/test-00000-of-00001-29a571947c0b5ccc.parquet",
             "c5e39bf32e33f9111323aa68d7d9000d22722035"),
    "proof-pile": ("hoskinson-center/proof-pile", "test/proofpile_test.jsonl.gz",
                   "490b980249446f2f3bd2df3a8cf085d0f2de240a"),
}
# fmt: on
PRESETS = {name: hub_file(*file) for name, file in PINNED.items()}


def evaluation_documents(
    source: str, split: str = "test", column: str = "text", subset: str | None = None, hold_out: float | None = None
) -> Iterator[Document]:
    """Return the documents to measure on, read as they are asked for in a fixed order: of `builtin:stdlib` and of the
    hub those of `split`, or of `PRESETS`; with `hold_out` only those that training leaves out. Raise DataError if there
    are none, or while reading.
    """
    if source == RECALL:
        raise DataError(f"{RECALL}: is for training; measure recall with `pi-lora eval passkey`")
    # The first of a large data set are measured without downloading all of it.
    streaming = hold_out is not None
    named = Source(name=source, split=split, column=column, subset=subset, hold_out=hold_out, streaming=streaming)
    table = PRESETS.get(source) or find_corpus(named, held_out=True)
    return table.documents()
