"""Documents and rows in files on disk: which files a name stands for, and what is in them."""

import csv
import glob
import gzip
import hashlib
import json
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pi_lora.errors import DataError, first_line
from pi_lora.types import Json

JSON_LINES = (".jsonl", ".jsonl.gz")
PARQUET = ".parquet"
CSV = ".csv"
TABLE_SUFFIXES = (*JSON_LINES, PARQUET, CSV)
SUFFIXES = (".txt", ".md", ".tex", ".py", ".rst", *TABLE_SUFFIXES)

File = Path | zipfile.Path
# The name of a row in messages (`file:line`), and the values of the row by column.
NamedJson = tuple[str, Json]


class Document(NamedTuple):
    """A text and where it came from."""

    name: str
    text: str


def looks_local(name: str) -> bool:
    """Whether a source is built in or a file, folder or glob, which need not exist; a data set of the hub is not local.

    >>> [looks_local(name) for name in ("./books", "~/x", "books/*.txt", "gone.jsonl", "owner/books")]
    [True, True, True, True, False]
    """
    has_prefix = name.startswith((".", "~", "/", "builtin:"))
    has_suffix = name.lower().endswith(SUFFIXES)
    return has_prefix or has_suffix or glob.has_magic(name) or Path(name).exists()


def files_named(name: str) -> list[Path]:
    """Return the files that a file, folder or glob names, those of a folder at any depth. Raise DataError if none."""
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        matches = list(path.rglob("*"))
    else:
        names = glob.iglob(str(path), recursive=True)
        matches = [Path(match) for match in names]
    files = []
    for match in sorted(matches):
        if match.name.lower().endswith(SUFFIXES) and match.is_file():
            files.append(match)
    if not files:
        raise DataError(f"{name}: no such file or folder, or no text files in it ({', '.join(SUFFIXES)}); name others")
    return files


def fingerprint(files: Iterable[Path]) -> str:
    """Return a SHA-256 of the paths, sizes and modification times of files; their content is not read."""
    digest = hashlib.sha256()
    for file in files:
        state = file.stat()
        digest.update(f"{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def rows_in(file: File, name: str, columns: Sequence[str]) -> Iterator[NamedJson]:
    """Yield `(name:row, row)` for every row of a file; a file of text is one row with the column `text`. Raise
    DataError that names the row if a row cannot be read.
    """
    is_table = file.name.lower().endswith(TABLE_SUFFIXES)
    number = 1
    row_name = f"{name}:{number}" if is_table else name
    try:
        for row in _rows(file, columns):
            if not isinstance(row, dict) or None in row:
                raise ValueError("it is not one value for each column")
            yield row_name, row
            number += 1
            row_name = f"{name}:{number}" if is_table else name
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
        raise DataError(f"{row_name}: cannot be read ({first_line(error)}); correct it, or download it again") from None


def _rows(file: File, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a file by its suffix. `datasets` reads these formats too, but takes "NA" in CSV for a missing
    value and a date in JSON for no text, shifts the columns of a CSV file with an extra cell in each row, and names no
    row that is broken (5.2).
    """
    name = file.name.lower()
    if name.endswith(JSON_LINES):
        is_compressed = name.endswith(".gz")
        with file.open("rb") as raw, gzip.open(raw) if is_compressed else raw as lines:
            for line in lines:
                if not line.isspace():
                    yield json.loads(line)
    elif name.endswith(PARQUET):
        import pyarrow.parquet  # takes a second, and journals import this file

        with pyarrow.parquet.ParquetFile(file) as table:
            # If a column is missing, all columns are read, so that a message can name them.
            has_columns = set(columns) <= set(table.schema_arrow.names)
            columns_read = list(columns) if has_columns else None
            for batch in table.iter_batches(256, columns=columns_read):
                yield from batch.to_pylist()
    elif name.endswith(CSV):
        csv.field_size_limit(sys.maxsize)  # a cell may hold a whole report
        with file.open(encoding="utf-8-sig", newline="") as lines:
            yield from csv.DictReader(lines, strict=True)
    else:
        yield {"text": file.read_text(encoding="utf-8")}


def read_document(name: str) -> str:
    """Return the text of a file, or of standard input (`-`). Raise DataError if there is no text."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{name}: cannot be read ({first_line(error)}); name a file of text, or - ") from None
    if not text.strip():
        raise DataError(f"{name}: holds no text; name a file of text")
    return text
