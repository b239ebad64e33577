"""Documents and rows in files on disk: which files a name stands for, and what is in them.

`datasets` reads the same formats, but it copies every file into its cache first, and its errors name no line.
"""

import csv
import glob
import gzip
import hashlib
import importlib.util
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pi_lora.errors import DataError, PiLoraError
from pi_lora.types import Json

TEXT_SUFFIXES = (".txt", ".md", ".tex", ".py", ".rst")
JSON_LINES = (".jsonl", ".jsonl.gz")
PARQUET, CSV, PDF = ".parquet", ".csv", ".pdf"
GLOB_CHARACTERS = frozenset("*?[")
PARQUET_ROWS_AT_ONCE = 256
STDIN = "-"


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
    return named or not GLOB_CHARACTERS.isdisjoint(name) or Path(name).exists()


def files_named(name: str, suffixes: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the files that `name` stands for: itself, those of a folder and its subfolders, or those of a glob.

    Raises DataError if nothing is there, or nothing whose name ends in one of `suffixes`.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return (path,)
    if path.is_dir():
        found = list(path.rglob("*"))
    elif GLOB_CHARACTERS.isdisjoint(name):
        raise DataError(f"{name}: no such file or folder; name a file, a folder, a glob, or builtin:stdlib")
    elif not (found := [Path(match) for match in glob.iglob(str(path), recursive=True)]):
        raise DataError(f"{name}: matches no file; check the pattern")
    files = sorted(file for file in found if file.name.lower().endswith(suffixes) and file.is_file())
    if not files:
        raise DataError(f"{name}: holds no text files ({', '.join(suffixes)}); name a folder or glob that does")
    return tuple(files)


def fingerprint(files: Iterable[Path]) -> str:
    """Return a SHA-256 of the paths, sizes and modification times of files; their content is not read."""
    digest = hashlib.sha256()
    for file in files:
        state = file.stat()
        digest.update(f"{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def rows_in(file: Path, columns: Sequence[str], suffixes: tuple[str, ...]) -> Iterator[tuple[str, Json]]:
    """Yield `(file:line, row)` for every row of a file, with at least those of `columns` that it has.

    A file whose name does not end in one of `suffixes`, or is of text, is one row: its text, under every column.
    Raise DataError if the file cannot be read, is damaged, or lacks a column.
    """
    kind = next((suffix for suffix in suffixes if file.name.lower().endswith(suffix)), None)
    try:
        if kind in JSON_LINES:
            with gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb") as lines:
                yield from json_rows(lines, str(file), columns[0])
        elif kind == PARQUET:
            yield from _parquet_rows(file, columns)
        elif kind == CSV:
            yield from _csv_rows(file)
        else:
            text = _decoded(file.read_bytes(), str(file), "a text file")
            yield str(file), dict.fromkeys(columns, text.replace("\r\n", "\n").replace("\r", "\n"))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({error}); check its permissions, or download it again") from None


def json_rows(lines: Iterable[bytes], name: str, column: str) -> Iterator[tuple[str, Json]]:
    """Yield `(name:line, object)` for each line of JSON Lines; messages show `column` as an example."""
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        where = f"{name}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise DataError(f"{where}: is not UTF-8 text; convert the file") from None
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: is broken JSON ({error.msg}); correct the line") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: is not a JSON object; write one per line, as {{{json.dumps(column)}: ...}}")
        yield where, row


def check_columns(where: str, columns: Sequence[str], there: Sequence[str] | Mapping[str, object]) -> None:
    """Raise DataError if one of `columns` is not `there`."""
    if missing := " and no ".join(column for column in columns if column not in there):
        raise DataError(f"{where}: has no column {missing}; choose from its columns: {', '.join(there)}")


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, Json]]:
    # Imported here, since most sources need no Parquet, and it takes a tenth of a second.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            check_columns(str(file), columns, table.schema_arrow.names)
            batches = table.iter_batches(PARQUET_ROWS_AT_ONCE, columns=list(columns))
            for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
                yield f"{file}:{number}", row
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{file}: is not a whole Parquet file ({reason}); download or write it again") from None


def _csv_rows(file: Path) -> Iterator[tuple[str, Json]]:
    # A row is named by the line that it ends on; a cell may hold a whole report (the default limit is 128 KiB).
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
        raise DataError(f"{file}: is not a whole CSV file ({error}); correct it, or write it again") from None


def _decoded(content: bytes, name: str, kinds: str) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{name}: is not UTF-8 text; convert it, or name {kinds}") from None
    if "\0" in text:
        raise DataError(f"{name}: is a binary file; name {kinds}")
    return text


def read_document(name: str) -> str:
    """Return the text of a text or PDF file, or of standard input for `-`; raise DataError if there is none.

    A PDF needs pypdf; its pages are separated by blank lines.
    """
    file, is_pdf = Path(name).expanduser(), name.lower().endswith(PDF)
    try:
        content = sys.stdin.buffer.read() if name == STDIN else file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); name a .txt, .md or .pdf file, or - ") from None
    named = "standard input" if name == STDIN else name
    text = _pdf(file) if is_pdf else _decoded(content, named, "a .txt, .md or .pdf file")
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
