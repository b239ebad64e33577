"""What every kind of source gives: documents, one after the other, in a fixed order or a seeded one."""

import csv
import glob
import gzip
import hashlib
import json
import random
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_lora.errors import DataError

SHUFFLE_CHARACTERS = 32_000_000


@dataclass(frozen=True)
class Document:
    """A text and where it came from."""

    name: str
    text: str


class Corpus(ABC):
    """A source that was found; its text is read as it is asked for, never held as a whole."""

    name: str

    @abstractmethod
    def read(self, seed: int | None) -> Iterator[Document]:
        """All texts, in a fixed order, or in the one that `seed` gives."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What decides the text, as JSON: a cache made from it is stale when this changes."""

    def documents(self, seed: int | None = None) -> Iterator[Document]:
        """The documents that hold text, in a fixed order, or in the one that `seed` gives.

        Raises:
            DataError: (while reading) something cannot be read, or nothing holds any text.
        """
        empty = True
        for document in self.read(seed):
            if document.text.strip():
                empty = False
                yield document
        if empty:
            raise DataError(f"{self.name}: holds no text, it is empty; name a source with text")


def no_column(column: str, names: Iterable[str], where: str) -> DataError:
    """What to say when `column` is not among `names`."""
    return DataError(f"{where}: has no column {column}; set column to the one that holds the text: {', '.join(names)}")


def text_of(row: Mapping[str, Any], column: str, where: str) -> str:
    """The text of a row; an absent value counts as no text.

    Raises:
        DataError: there is no such column, or it holds something else.
    """
    if column not in row:
        raise no_column(column, row, where)
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: column {column} holds {type(text).__name__}, not text; set column to one that does")
    return text or ""


def shuffled(documents: Iterable[Document], seed: int, room: int = SHUFFLE_CHARACTERS) -> Iterator[Document]:
    """A streaming shuffle: hold about `room` characters, and give a random one of those held for each that comes.

    Bounded by characters rather than documents, since a thousand books are a gigabyte and a thousand posts are not.
    """
    rng = random.Random(seed)
    held: list[Document] = []
    size = 0
    for document in documents:
        held.append(document)
        size += len(document.text)
        while size > room:
            index = rng.randrange(len(held))
            held[index], held[-1] = held[-1], held[index]
            size -= len(held[-1].text)
            yield held.pop()
    rng.shuffle(held)
    yield from held


PARQUET_ROWS_AT_ONCE = 256
CSV = ".csv"

# Where a row stands, and its columns.
Row = tuple[str, dict[str, Any]]


def json_rows(file: Path, column: str) -> Iterator[Row]:
    """Each line of JSON lines, gzipped or not; `column` is only named to show what a line should look like.

    Raises:
        DataError: a line is not UTF-8, no JSON, or no object.
    """
    with gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            where = f"{file}:{number}"
            yield where, json_line(line, where, column)


def json_line(line: bytes, where: str, column: str) -> dict[str, Any]:
    """The object on a line.

    Raises:
        DataError: it is not UTF-8, no JSON, or no object.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise DataError(f"{where}: is not UTF-8 text; convert the file") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: is broken JSON ({error.msg}); mend the line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: is no JSON object; write one a line, as {{{json.dumps(column)}: ...}}")
    return row


def parquet_columns(file: Path) -> list[str]:
    """The names of a Parquet file's columns.

    Raises:
        DataError: it is no Parquet file, or was cut off.
    """
    # Imported here, since most sources need no Parquet, and it takes a tenth of a second.
    import pyarrow
    import pyarrow.parquet

    try:
        names: list[str] = pyarrow.parquet.read_schema(file).names
    except pyarrow.ArrowException as error:
        raise _no_parquet(file, error) from None
    return names


def parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The `columns` of each row, which must be there; a few hundred rows are in memory at a time.

    Raises:
        DataError: it is no Parquet file, or was cut off.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(PARQUET_ROWS_AT_ONCE, columns=list(columns)):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}:{number}", row
    except pyarrow.ArrowException as error:
        raise _no_parquet(file, error) from None


def csv_rows(file: Path) -> Iterator[Row]:
    """The rows of a CSV file (RFC 4180) whose first line names the columns, each named by the line it ends on.

    Raises:
        DataError: it is not UTF-8, has no columns, or a row has more cells than there are.
    """
    # A whole report may stand in one cell; by default `csv` stops at 128 KiB.
    csv.field_size_limit(sys.maxsize)
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            if not reader.fieldnames:
                raise DataError(f"{file}: is empty; its first line must name the columns")
            for row in reader:
                where = f"{file}:{reader.line_num}"
                if None in row:
                    raise DataError(f"{where}: has more cells than the first line has columns; quote cells with commas")
                yield where, row
    except UnicodeDecodeError:
        raise DataError(f"{file}: is not UTF-8 text; convert it") from None
    except csv.Error as error:
        raise DataError(f"{file}: is no whole CSV file ({error}); mend or write it again") from None


def _no_parquet(file: Path, error: Exception) -> DataError:
    reason = str(error).splitlines()[0]
    return DataError(f"{file}: is not a whole Parquet file ({reason}); fetch or write it again")


TEXT_SUFFIXES = (".txt", ".md", ".tex", ".py", ".rst")
ROW_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
SUFFIXES = TEXT_SUFFIXES + ROW_SUFFIXES
GLOB_CHARACTERS = frozenset("*?[")


def looks_local(name: str) -> bool:
    """Whether a source is a file, folder or glob rather than a data set of the hub, whether it exists or not.

    >>> [looks_local(name) for name in ("./books", "~/x", "books/*.txt", "gone.jsonl", "owner/books")]
    [True, True, True, True, False]
    """
    return (
        name.startswith((".", "~", "/"))
        or not GLOB_CHARACTERS.isdisjoint(name)
        or name.lower().endswith((*SUFFIXES, CSV))
        or Path(name).exists()
    )


@dataclass(frozen=True)
class LocalFiles(Corpus):
    """Files, read one at a time. The seeded order shuffles the files, and the rows of each through a buffer."""

    name: str
    files: tuple[Path, ...]
    column: str

    @classmethod
    def find(cls, name: str, column: str) -> "LocalFiles":
        """The files that `name` stands for: itself, those of a folder and its subfolders, or those of a glob.

        Raises:
            DataError: nothing is there, or nothing of a kind that holds text.
        """
        return cls(name, files_named(name, SUFFIXES), column)

    def read(self, seed: int | None) -> Iterator[Document]:
        """File after file, row after row."""
        if seed is None:
            for file in self.files:
                yield from _documents(file, self.column)
            return
        files = list(self.files)
        random.Random(seed).shuffle(files)
        for file in files:
            yield from shuffled(_documents(file, self.column), seed)

    def identity(self) -> dict[str, Any]:
        """The files with their sizes and times of change."""
        return {"files": len(self.files), "sha256": fingerprint(self.files)}


def files_named(name: str, suffixes: tuple[str, ...]) -> tuple[Path, ...]:
    """The files that `name` stands for: itself, those of a folder and its subfolders, or those of a glob.

    Raises:
        DataError: nothing is there, or nothing whose name ends in one of `suffixes`.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return (path,)
    if path.is_dir():
        found = list(path.rglob("*"))
    elif not GLOB_CHARACTERS.isdisjoint(name):
        found = [Path(match) for match in glob.iglob(str(path), recursive=True)]
        if not found:
            raise DataError(f"{name}: matches no file; check the pattern")
    else:
        raise DataError(f"{name}: no such file or folder; name a file, a folder, a glob, or builtin:stdlib")
    files = sorted(file for file in found if file.name.lower().endswith(suffixes) and file.is_file())
    if not files:
        raise DataError(f"{name}: holds no text files ({', '.join(suffixes)}); name a folder or glob that does")
    return tuple(files)


def fingerprint(files: Iterable[Path]) -> str:
    """A digest of where files are, how long, and when last changed; their content is not read."""
    digest = hashlib.sha256()
    for file in files:
        state = file.stat()
        digest.update(f"{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _documents(file: Path, column: str) -> Iterator[Document]:
    name = file.name.lower()
    try:
        if name.endswith(".parquet"):
            if column not in (names := parquet_columns(file)):
                raise no_column(column, names, str(file))
            for where, row in parquet_rows(file, [column]):
                yield Document(where, text_of(row, column, str(file)))
        elif name.endswith(ROW_SUFFIXES):
            for where, row in json_rows(file, column):
                yield Document(where, text_of(row, column, where))
        else:
            yield Document(str(file), _text(file))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({error}); check its permissions, or fetch it again") from None


def _text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{file}: is not UTF-8 text; convert it, or name a text file") from None
    if "\0" in text:
        raise DataError(f"{file}: is a binary file; name a text file")
    return text
