"""Documents and rows in files on disk: which files a name stands for, and what is in them.

`datasets` reads the same formats, but it copies every file into its cache first, and its errors name no line.
"""

import csv
import glob
import gzip
import hashlib
import importlib.util
import json
import os
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from pi_lora.errors import DataError, PiLoraError
from pi_lora.types import Json

TEXT_SUFFIXES = (".txt", ".md", ".tex", ".py", ".rst")
JSON_LINES = (".jsonl", ".jsonl.gz")
PARQUET, CSV, PDF = ".parquet", ".csv", ".pdf"
# Documents come from text files and from rows; a CSV file is a table only, and as a document it is its plain text.
DOCUMENT_SUFFIXES = (*TEXT_SUFFIXES, *JSON_LINES, PARQUET)
TABLE_SUFFIXES = (*JSON_LINES, PARQUET, CSV)

File = Path | zipfile.Path
# What names a row in a message (`file:line`), and its values by column.
NamedJson = tuple[str, Json]


@dataclass(frozen=True)
class Document:
    """A text and where it came from."""

    name: str
    text: str


def looks_local(name: str) -> bool:
    """Whether a source is a file, folder or glob rather than a data set of the hub, whether it exists or not.

    >>> [looks_local(name) for name in ("./books", "~/x", "books/*.txt", "gone.jsonl", "owner/books")]
    [True, True, True, True, False]
    """
    named = name.startswith((".", "~", "/")) or name.lower().endswith((*TEXT_SUFFIXES, *JSON_LINES, PARQUET, CSV))
    return named or glob.has_magic(name) or Path(name).exists()


def files_named(name: str, suffixes: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the files that `name` stands for: itself, those in a folder at any depth, or of a glob, or raise
    DataError.
    """
    path = Path(os.path.expanduser(name))
    if path.is_file():
        return (path,)
    found = path.rglob("*") if path.is_dir() else map(Path, glob.iglob(str(path), recursive=True))
    files = sorted(file for file in found if file.name.lower().endswith(suffixes) and file.is_file())
    if not files:
        what = "holds" if path.is_dir() else "no such file or folder, or matches"
        raise DataError(f"{name}: {what} no text files ({', '.join(suffixes)}); name others, or builtin:stdlib")
    return tuple(files)


def fingerprint(files: Iterable[Path]) -> str:
    """Return a SHA-256 of the paths, sizes and modification times of files; their content is not read."""
    digest = hashlib.sha256()
    for file in files:
        state = file.stat()
        digest.update(f"{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def rows_in(file: File, columns: Sequence[str], suffixes: tuple[str, ...]) -> Iterator[NamedJson]:
    """Yield `(file:line, row)` for every row of a file, with at least those of `columns` that it has; raise DataError
    if it is damaged or cannot be read. One whose name does not end in one of `suffixes`, or is of text, is one row, its
    text under every column.
    """
    kind = next((suffix for suffix in suffixes if file.name.lower().endswith(suffix)), "text")
    try:
        if kind in JSON_LINES:
            yield from _json_rows(file, columns[0])
        elif kind == PARQUET:
            yield from _parquet_rows(file, columns)
        elif kind == CSV:
            yield from _csv_rows(file)
        else:
            text = _decoded(file.read_bytes(), str(file))
            yield str(file), dict.fromkeys(columns, text.replace("\r\n", "\n").replace("\r", "\n"))
    except UnicodeDecodeError:
        raise DataError(f"{file}: is not UTF-8 text; convert it") from None
    except (OSError, EOFError, zlib.error, csv.Error, pyarrow.ArrowException) as error:
        reason, *_ = str(error).splitlines()
        advice = "check its permissions, or download or write it again"
        raise DataError(f"{file}: cannot be read as {kind} ({reason}); {advice}") from None


def _json_rows(file: File, example: str) -> Iterator[NamedJson]:
    with file.open("rb") as raw, gzip.open(raw) if file.name.lower().endswith(".gz") else raw as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            where = f"{file}:{number}"
            text = line.decode("utf-8")
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:  # also of numbers of thousands of digits
                why = error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(";")[0]
                raise DataError(f"{where}: is broken JSON ({why}); correct the line") from None
            if not isinstance(row, dict):
                shown = f"{{{json.dumps(example)}: ...}}"
                raise DataError(f"{where}: is not a JSON object; write one per line, as {shown}")
            yield where, row


def _parquet_rows(file: File, columns: Sequence[str]) -> Iterator[NamedJson]:
    with pyarrow.parquet.ParquetFile(file) as table:
        # Where one is missing all are read, so that a message can name them.
        known = set(columns) <= set(table.schema_arrow.names)
        batches = table.iter_batches(256, columns=list(columns) if known else None)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"{file}:{number}", row


def _csv_rows(file: File) -> Iterator[NamedJson]:
    # A row is named by the line that it ends on; a cell may hold a whole report (the default limit is 128 KiB).
    csv.field_size_limit(sys.maxsize)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        if not reader.fieldnames:
            raise DataError(f"{file}: is empty; its first line must name the columns")
        for row in reader:
            where = f"{file}:{reader.line_num}"
            if None in row:
                raise DataError(f"{where}: has more cells than the first line has columns; quote cells with commas")
            yield where, row


def _decoded(content: bytes, name: str) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{name}: is not UTF-8 text; convert it, or name another file") from None
    if "\0" in text:
        raise DataError(f"{name}: is a binary file; name one of text")
    return text


def read_document(name: str) -> str:
    """Return the text of a text or PDF file (by pypdf), or of standard input (`-`); raise DataError without any."""
    file, is_pdf = Path(os.path.expanduser(name)), name.lower().endswith(PDF)
    try:
        content = sys.stdin.buffer.read() if name == "-" else file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); name a .txt, .md or .pdf file, or - ") from None
    text = _pdf(file) if is_pdf else _decoded(content, "standard input" if name == "-" else name)
    text = text.removeprefix("\N{BYTE ORDER MARK}")
    if not text.strip():
        more = "; its pages may be scanned pictures: recognize their text (OCR) first" if is_pdf else ""
        raise DataError(f"{name}: holds no text{more}")
    return text


def _pdf(file: Path) -> str:
    if importlib.util.find_spec("pypdf") is None:
        raise PiLoraError(f"{file}: PDF needs the package pypdf; pip install 'pi-lora[pdf]'")
    import pypdf
    from pypdf.errors import PyPdfError

    try:
        return "\n\n".join(page.extract_text() for page in pypdf.PdfReader(file).pages)
    except (PyPdfError, ValueError, KeyError, TypeError) as error:  # what damaged files raise
        raise DataError(f"{file}: is not a whole PDF ({error}); download it again, or give its text") from None
