"""Local files as a source: a text file is a document, a row of `.jsonl` or `.parquet` is one; folders and globs."""

import glob
import hashlib
import random
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_lora.data.documents import Corpus, Document, no_column, shuffled, text_of
from pi_lora.data.rows import CSV, json_rows, parquet_columns, parquet_rows
from pi_lora.errors import DataError

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
