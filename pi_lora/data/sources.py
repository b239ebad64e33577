"""Sources of rows with named columns: local files, the hub, and Python's standard library; documents are one column."""

import hashlib
import os
import platform
import random
import sysconfig
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.constants import HF_HUB_CACHE

from pi_lora.data import documents
from pi_lora.data.documents import DOCUMENT_SUFFIXES, TABLE_SUFFIXES, Document, NamedJson
from pi_lora.data.hub import commit_of_rows, load_rows
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Source
from pi_lora.types import Json

STDLIB = "builtin:stdlib"
RECALL = "builtin:recall"
# Tests and vendored packages are not in every installation; code page tables and the compiled help are hardly text.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
HELD_OUT_SHARE = 0.1
SHUFFLE_CHARACTERS = 32_000_000
# Of the buffer in which `datasets` shuffles a stream; few suffice, since `shuffled` comes after it.
STREAMED_ROWS = 100
# Its loader is a script, which `datasets` no longer runs; the script reads `SPLIT.jsonl` out of `SUBSET.zip`.
SCROLLS = "tau/scrolls"

# What names a row in a message (`file:line`), and its texts by column.
NamedRow = tuple[str, dict[str, str]]


class Table(ABC):
    """A source that was found; its rows are read as they are asked for and never held as a whole."""

    name: str
    column: str

    @abstractmethod
    def rows(self, columns: Sequence[str], seed: int | None = None) -> Iterator[NamedRow]:
        """Yield the texts in `columns` of every row, in a fixed order or in the one that `seed` gives."""

    @abstractmethod
    def identity(self) -> Json:
        """Return what decides the rows, as JSON: a cache made from them is stale when this changes."""

    def size(self) -> int | None:
        """Return the bytes of its files on this machine; None of what is on the hub."""
        return None

    def documents(self, seed: int | None = None) -> Iterator[Document]:
        """Yield the texts of `column` that are not blank, ordered as `rows`; raise DataError if there is none."""
        found = (Document(where, row[self.column]) for where, row in self.rows([self.column], seed))
        filled = (document for document in found if document.text.strip())
        if (first := next(filled, None)) is None:
            raise DataError(f"{self.name}: holds no text, it is empty; name a source with text")
        yield first
        yield from filled


def texts(rows: Iterable[NamedJson], columns: Sequence[str]) -> Iterator[NamedRow]:
    """Yield `columns` of each row, None as an empty text; raise DataError where one is absent or not text."""
    for where, row in rows:
        if missing := " and no ".join(column for column in columns if column not in row):
            raise DataError(f"{where}: has no column {missing}; choose from its columns: {', '.join(row)}")
        for column in columns:
            if not isinstance(row[column], str | None):
                kind = type(row[column]).__name__
                raise DataError(f"{where}: column {column} holds {kind}, not text; name a column that does")
        yield where, {column: row[column] or "" for column in columns}


def shuffled(rows: Iterable[NamedRow], seed: int | None, room: int = SHUFFLE_CHARACTERS) -> Iterator[NamedRow]:
    """Shuffle a stream: hold about `room` characters, and yield a random one of the rows held for each that comes.

    Bounded by characters rather than rows, since a thousand books are a gigabyte and a thousand posts are not. Without
    a seed the order stays.
    """
    if seed is None:
        yield from rows
        return
    rng = random.Random(seed)
    held: list[NamedRow] = []
    size = 0
    for where, row in rows:
        held.append((where, row))
        size += sum(map(len, row.values()))
        while size > room:
            index = rng.randrange(len(held))
            held[index], held[-1] = held[-1], held[index]
            size -= sum(map(len, held[-1][1].values()))
            yield held.pop()
    rng.shuffle(held)
    yield from held


@dataclass(frozen=True)
class LocalFiles(Table):
    """Files, read one at a time. The seeded order shuffles the files, and the rows of each through a buffer."""

    name: str
    files: tuple[Path, ...]
    column: str = "text"
    suffixes: tuple[str, ...] = DOCUMENT_SUFFIXES

    def rows(self, columns: Sequence[str], seed: int | None = None) -> Iterator[NamedRow]:
        """Yield file after file, row after row."""
        files = list(self.files)
        if seed is not None:
            random.Random(seed).shuffle(files)
        for file in files:
            yield from shuffled(texts(documents.rows_in(file, columns, self.suffixes), columns), seed)

    def size(self) -> int:
        """Return the bytes of its files; of compressed ones they count as text."""
        return sum(file.stat().st_size for file in self.files)

    def identity(self) -> Json:
        """Return the number of files, and a digest of their sizes and modification times."""
        return {"files": len(self.files), "sha256": documents.fingerprint(self.files)}


def is_held_out(relative_path: str) -> bool:
    """Whether a file belongs to the held-out split; decided by its name alone, so the same under every Python."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_SHARE


@dataclass(frozen=True)
class StandardLibrary(Table):
    """Python's own sources, those held out or the others: a few megabytes, all of which are shuffled."""

    held_out: bool = False
    name: str = STDLIB
    column: str = "text"

    def rows(self, columns: Sequence[str], seed: int | None = None) -> Iterator[NamedRow]:
        """Yield file after file that is not blank, its text under every column."""
        read = ((name, file.read_text(encoding="utf-8", errors="replace")) for name, file in self._files().items())
        found = ((name, dict.fromkeys(columns, text)) for name, text in read if text.strip())
        return shuffled(found, seed)

    def size(self) -> int:
        """Return the bytes of its files."""
        return sum(file.stat().st_size for file in self._files().values())

    def identity(self) -> Json:
        """Return the Python that it belongs to, and a digest of its files."""
        return {"python": platform.python_version(), "sha256": documents.fingerprint(self._files().values())}

    def _files(self) -> dict[str, Path]:
        root = Path(sysconfig.get_path("stdlib"))
        found: list[Path] = []
        for folder, folders, files in os.walk(root):
            # Not entered at all: what is installed beside the library is often a hundred times as much.
            folders[:] = (name for name in folders if name not in SKIPPED_FOLDERS)
            found += (Path(folder, name) for name in files if name.endswith(".py"))
        named = {path.relative_to(root).as_posix(): path for path in sorted(found)}
        return {name: path for name, path in named.items() if is_held_out(name) == self.held_out}


def commit_of(name: str, revision: str) -> str:
    """Return the commit that a revision of a hub data set stands for: now, or if the hub cannot be asked, when it was
    last downloaded. The revision as it is written for one that never was.
    """
    try:
        return HfApi().dataset_info(name, revision=revision).sha or revision
    except Exception:
        # Offline, gone or gated: loading finds out which, and has the data set on disk or says why not.
        known = Path(HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}", "refs", revision)
        return known.read_text(encoding="utf-8").strip() if known.is_file() else revision


class HubDataset(Table):
    """A split of a hub data set; nothing is fetched before it is read.

    The seeded order permutes all rows on disk; of a stream the files, several of which are read in turns into a buffer.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.name, self.column = source, source.name, source.column

    @cached_property
    def commit(self) -> str:
        """The commit that the revision stands for."""
        return commit_of_rows(self.source)

    def identity(self) -> Json:
        """Return the commit."""
        return {"commit": self.commit}

    def rows(self, columns: Sequence[str], seed: int | None = None) -> Iterator[NamedRow]:
        """Yield row after row, each named by its number where the order is fixed."""
        return shuffled(texts(self._read(columns, seed), columns), seed if self.source.streaming else None)

    @cached_property
    def _dataset(self) -> Any:
        return load_rows(self.source, self.commit)

    def _read(self, columns: Sequence[str], seed: int | None) -> Iterator[NamedJson]:
        try:
            dataset = self._dataset
            # What is not needed is not decoded. A streamed data set may not know its columns before its first row.
            if set(columns) <= set(dataset.column_names or ()):
                dataset = dataset.select_columns(list(columns))
            if seed is not None:
                dataset = dataset.shuffle(seed, **({"buffer_size": STREAMED_ROWS} if self.source.streaming else {}))
            for number, row in enumerate(dataset, 1):
                yield (f"{self.name}:{number}" if seed is None else self.name), row
        except DataError:
            raise
        except Exception as error:
            # `datasets` raises a dozen kinds for a user's mistakes: not found, gated, offline, no such split.
            raise _not_on_the_hub(self.name, error) from error


@dataclass(frozen=True)
class HubFile(Table):
    """One file of a data set on the hub as it was uploaded, or a `member` of a zip archive, so that no script runs."""

    name: str
    file: str
    revision: str
    column: str = "text"
    member: str = ""

    def rows(self, columns: Sequence[str], seed: int | None = None) -> Iterator[NamedRow]:
        """Yield row after row, named by where they are on the hub; raise DataError if it cannot be downloaded."""
        try:
            path = Path(hf_hub_download(self.name, self.file, repo_type="dataset", revision=self.revision))
        except OSError as error:
            raise _not_on_the_hub(f"{self.name}/{self.file}", error) from None
        file = zipfile.Path(path, self.member) if self.member else path
        if not file.is_file():
            raise DataError(f"{self.name}: has no split {self.member}; there are train, validation and test")
        there = f"{self.name}/{self.member.removesuffix('.jsonl') or self.file}"
        rows = documents.rows_in(file, columns, DOCUMENT_SUFFIXES)
        named = ((where.replace(str(file), there, 1), row) for where, row in rows)
        return shuffled(texts(named, columns), seed)

    def identity(self) -> Json:
        """Return the commit; that of a preset is written there."""
        pinned = self in PRESETS.values()
        return {"commit": self.revision if pinned else commit_of(self.name, self.revision)}


def _not_on_the_hub(name: str, error: Exception) -> DataError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DataError(
        f"{name}: is neither a file or folder nor a hub data set that can be read ({reason}); "
        "check its name, subset, split and revision, the network, or log in with `hf auth login`"
    )


def find_table(source: Source, suffixes: tuple[str, ...] = TABLE_SUFFIXES) -> Table:
    """Find the rows that `source` names; raise DataError if they are not there (for the hub, when they are read)."""
    name = source.name
    if name.startswith("builtin:"):
        raise DataError(f"{name}: no such built-in rows; there are {STDLIB} and {RECALL}, and only as text to pack")
    if name == SCROLLS:
        if source.subset is None:
            raise DataError(f"{SCROLLS}: has several subsets; set subset, as gov_report")
        member = f"{source.subset}/{source.split}.jsonl"
        return HubFile(SCROLLS, f"{source.subset}.zip", source.revision, source.column, member)
    if not documents.looks_local(name):
        return HubDataset(source)
    files = documents.files_named(name, suffixes)
    if suffixes == TABLE_SUFFIXES and not files[0].name.lower().endswith(suffixes):
        raise DataError(f"{name}: holds no rows with columns; name {', '.join(suffixes)} files")
    return LocalFiles(name, files, source.column, suffixes)


def find_corpus(source: Source, held_out: bool = False) -> Table:
    """Find the documents that `source` names, as `find_table` does; of `builtin:recall` the text between its facts."""
    if source.name in (STDLIB, RECALL):
        return StandardLibrary(held_out)
    return find_table(source, DOCUMENT_SUFFIXES)


@dataclass(frozen=True)
class Choice:
    """The first `documents` of at least `min_tokens`, or with a `seed` as many at random, `truncate`d to that length.

    `split` and `column` are of hub data sets, `column` also of rows in local files.
    """

    documents: int | None = None
    min_tokens: int | None = None
    truncate: int | None = None
    seed: int | None = None
    split: str = "test"
    column: str = "text"

    def of(self, source: str) -> "Choice":
        """Return this choice, with the default among the documents of `source` where it leaves something open."""
        return replace(CHOICES.get(source, self), **{key: x for key, x in asdict(self).items() if x is not None})


PRESETS = {
    # All 100 books of the test split; `deepmind/pg19` itself needs a script.
    "pg19": HubFile(
        "emozilla/pg19-test",
        "data/test-00000-of-00001-29a571947c0b5ccc.parquet",
        "c5e39bf32e33f9111323aa68d7d9000d22722035",
    ),
    "proof-pile": HubFile(
        "hoskinson-center/proof-pile", "test/proofpile_test.jsonl.gz", "490b980249446f2f3bd2df3a8cf085d0f2de240a"
    ),
}
# The paper's choice of documents: 128 of 32768 tokens and more; which the paper drew is not known. Of the standard
# library what the built-in model reads in a minute or two on two cores.
CHOICES = {
    "proof-pile": Choice(documents=128, min_tokens=32768, truncate=32768, seed=0),
    STDLIB: Choice(documents=12),
}


def evaluation_documents(source: str, split: str = "test", column: str = "text") -> Iterator[Document]:
    """Return the documents to measure on, in a fixed order, read as they are asked for.

    Of `builtin:stdlib` they are the held-out files. `split` is of hub data sets; `PRESETS` know their own. Raises
    DataError if the source does not exist, or while reading if it holds no readable text.
    """
    if source == RECALL:
        raise DataError(f"{RECALL}: is for training; measure recall with `pi-lora eval passkey`")
    if source in PRESETS:
        return PRESETS[source].documents()
    return find_corpus(Source(name=source, split=split, column=column), held_out=True).documents()
