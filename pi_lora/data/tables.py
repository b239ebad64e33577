"""Sources of rows with named columns, from local files and from the hub; documents are one column of them."""

import random
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from pi_lora.data import documents
from pi_lora.data.documents import CSV, JSON_LINES, PARQUET, TEXT_SUFFIXES, Document
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Source
from pi_lora.types import Json

# Documents come from text files and from rows; a CSV file is a table only, and as a document it is its plain text.
DOCUMENT_SUFFIXES = (*TEXT_SUFFIXES, *JSON_LINES, PARQUET)
TABLE_SUFFIXES = (*JSON_LINES, PARQUET, CSV)
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

    def documents(self, seed: int | None = None) -> Iterator[Document]:
        """Yield the texts of `column` that are not blank, ordered as `rows`; raise DataError if there is none."""
        found = (Document(where, row[self.column]) for where, row in self.rows([self.column], seed))
        filled = (document for document in found if document.text.strip())
        if (first := next(filled, None)) is None:
            raise DataError(f"{self.name}: holds no text, it is empty; name a source with text")
        yield first
        yield from filled


def texts(rows: Iterable[tuple[str, Json]], columns: Sequence[str]) -> Iterator[NamedRow]:
    """Yield `columns` of each row, None as an empty text; raise DataError where one is absent or not text."""
    for where, row in rows:
        documents.check_columns(where, columns, row)
        for column in columns:
            if not isinstance(row[column], str | None):
                kind = type(row[column]).__name__
                raise DataError(f"{where}: column {column} holds {kind}, not text; name a column that does")
        yield where, {column: row[column] or "" for column in columns}


def shuffled(rows: Iterable[NamedRow], seed: int, room: int = SHUFFLE_CHARACTERS) -> Iterator[NamedRow]:
    """Shuffle a stream: hold about `room` characters, and yield a random one of the rows held for each that comes.

    Bounded by characters rather than rows, since a thousand books are a gigabyte and a thousand posts are not.
    """
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
            rows = texts(documents.rows_in(file, columns, self.suffixes), columns)
            yield from rows if seed is None else shuffled(rows, seed)

    def identity(self) -> Json:
        """Return the number of files, and a digest of their sizes and modification times."""
        return {"files": len(self.files), "sha256": documents.fingerprint(self.files)}


class HubDataset(Table):
    """A split of a hub data set; nothing is fetched before it is read.

    The seeded order permutes all rows on disk; of a stream the files, several of which are read in turns into a buffer.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.name, self.column = source, source.name, source.column

    @cached_property
    def commit(self) -> str:
        """The commit that the revision stands for now; where the hub cannot be asked, the revision as it is written."""
        try:
            return HfApi().dataset_info(self.name, revision=self.source.revision).sha or self.source.revision
        except Exception:
            # Offline, gone or gated: loading finds out which, and has the data set on disk or says why not.
            return self.source.revision

    def identity(self) -> Json:
        """Return the commit."""
        return {"commit": self.commit}

    def rows(self, columns: Sequence[str], seed: int | None = None) -> Iterator[NamedRow]:
        """Yield row after row, each named by its number where the order is fixed."""
        rows = texts(self._read(columns, seed), columns)
        return shuffled(rows, seed) if seed is not None and self.source.streaming else rows

    @cached_property
    def _dataset(self) -> Any:
        # `datasets` takes a second to import, and local text does without.
        from datasets import load_dataset

        its = self.source
        return load_dataset(its.name, its.subset, split=its.split, revision=self.commit, streaming=its.streaming)

    def _read(self, columns: Sequence[str], seed: int | None) -> Iterator[tuple[str, Json]]:
        try:
            dataset = self._dataset
            # What is not needed is not decoded. A streamed data set may not know its columns before its first row.
            if set(columns) <= set(dataset.column_names or ()):
                dataset = dataset.select_columns(list(columns))
            if seed is not None:
                dataset = dataset.shuffle(seed, **({"buffer_size": STREAMED_ROWS} if self.source.streaming else {}))
            for number, row in enumerate(dataset, 1):
                yield (f"{self.name}:{number}" if seed is None else self.name), row
        except Exception as error:
            # `datasets` raises a dozen kinds for a user's mistakes: not found, gated, offline, no such split.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{self.name}: is neither a file or folder nor a hub data set that can be read ({reason}); "
                "check its name, subset, split and revision, the network, or log in with `hf auth login`"
            ) from error


@dataclass(frozen=True)
class HubFile(Table):
    """One file of a data set on the hub, as it was uploaded, so that no script has to run."""

    name: str
    file: str
    revision: str
    column: str = "text"

    def downloaded(self) -> Path:
        """Download the file, or find it in the hub's cache; raise DataError if neither works."""
        try:
            return Path(hf_hub_download(self.name, self.file, repo_type="dataset", revision=self.revision))
        except (OSError, HfHubHTTPError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise DataError(
                f"{self.name}: {self.file} cannot be downloaded from the hub ({reason}); "
                "check the name and the network, or download it elsewhere and name the local file"
            ) from None

    def rows(self, columns: Sequence[str], seed: int | None = None) -> Iterator[NamedRow]:
        """Yield row after row, named by where they are on the hub."""
        path = self.downloaded()
        for where, row in LocalFiles(self.name, (path,)).rows(columns, seed):
            yield where.replace(str(path), f"{self.name}/{self.file}", 1), row

    def identity(self) -> Json:
        """Return the revision; a branch may move, a commit does not."""
        return {"revision": self.revision}


@dataclass(frozen=True)
class Scrolls(HubFile):
    """A task of SCROLLS (Shaham et al. 2022) in its own version, as the paper uses GovReport: `input` and `output`."""

    split: str = "train"

    def rows(self, columns: Sequence[str], seed: int | None = None) -> Iterator[NamedRow]:
        """Yield line after line of the split's file, in this order alone."""
        task = self.file.removesuffix(".zip")
        where, member = f"{self.name}/{task}", f"{task}/{self.split}.jsonl"
        with zipfile.ZipFile(self.downloaded()) as archive:
            if member not in archive.namelist():
                raise DataError(f"{where}: has no split {self.split}; there are train, validation and test")
            with archive.open(member) as lines:
                yield from texts(documents.json_rows(lines, f"{where}/{self.split}", columns[0]), columns)


def find_table(source: Source) -> Table:
    """Find the rows that `source` names; raise DataError if they are not there (for the hub, when they are read)."""
    name = source.name
    if name.startswith("builtin:"):
        raise DataError(f"{name}: is text to pack, without columns; name files or a data set with rows")
    if name == SCROLLS:
        if source.subset is None:
            raise DataError(f"{SCROLLS}: has several subsets; set subset, as gov_report")
        return Scrolls(SCROLLS, f"{source.subset}.zip", source.revision, source.column, source.split)
    if not documents.looks_local(name):
        return HubDataset(source)
    files = documents.files_named(name, TABLE_SUFFIXES)
    if strange := [str(file) for file in files if not file.name.lower().endswith(TABLE_SUFFIXES)]:
        raise DataError(f"{strange[0]}: holds no rows with columns; name {', '.join(TABLE_SUFFIXES)} files")
    return LocalFiles(name, files, source.column, TABLE_SUFFIXES)
