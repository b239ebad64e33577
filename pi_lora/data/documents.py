"""Documents and rows in files on disk: which files a name stands for, and what is in them."""

import codecs
import csv
import glob
import hashlib
import io
import itertools
import json
import lzma
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pi_lora.errors import DataError, first_line
from pi_lora.recipe.data import CHAT_COLUMNS
from pi_lora.storage import digest_of
from pi_lora.types import Json

PARQUET = ".parquet"
# As `datasets` saves rows, as a stream. A file of Arrow is such a stream between this mark and an index.
ARROW = ".arrow"
ARROW_FILE_MARK = b"ARROW1\0\0"
# The delimiter by suffix.
DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLE_SUFFIXES = (".jsonl", ".ndjson", ".json", PARQUET, ARROW, *DELIMITERS)
SUFFIXES = (".txt", ".md", ".tex", ".py", ".rst", *TABLE_SUFFIXES)
# Documents that hold no plain text.
FORMATTED_SUFFIXES = (".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub", ".htm", ".html")
KINDS = f"{', '.join(SUFFIXES)}, and all but Parquet and Arrow with .gz, .bz2, .xz or .zst"
# What a folder of rows holds about them, as downloaded from the hub or saved by `datasets`: cards, licences, scripts.
ABOUT_ROWS = re.compile(
    r"(readme|licen[cs]e|notice|changelog|contributing|citation)\b[^.]*\.(md|txt|rst)|.*\.py"
    r"|(dataset_infos?|dataset_dict|state)\.json",
    re.IGNORECASE,
)
# A split in a name, such as train-00000.parquet or Testing/rows.csv.
SPLIT = re.compile(
    r"(?<![a-z])(?:(train)(?:ing)?|(test)(?:ing)?|(?:val(?:id(?:ation)?)?|dev|eval(?:uation)?))(?![a-z])", re.IGNORECASE
)
# The names of pyarrow, which does not read .xz.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
COMPRESSION = re.compile(r"\.(gz|bz2|xz|zst)$")
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

File = Path | zipfile.Path
# The name of a row in messages (`file:line`), and the values of the row by column.
NamedJson = tuple[str, Json]


class Document(NamedTuple):
    """A text and where it came from."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """A SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def suffix_of(name: str) -> str:
    """Return the suffix of a file in lower case, without that of its compression.

    >>> suffix_of("Shard.JSONL.zst"), suffix_of("notes.gz"), suffix_of("notes")
    ('.jsonl', '', '')
    """
    return Path(COMPRESSION.sub("", name.lower())).suffix


def looks_local(name: str) -> bool:
    """Whether a source is built in or a file, folder or glob, which need not exist; a data set of the hub is not local.

    >>> [looks_local(name) for name in ("./books", "~/x", "books/", "books/*.txt", "gone.jsonl", "owner/books")]
    [True, True, True, True, True, False]
    """
    has_prefix = name.startswith((".", "~", "/", "builtin:")) or name.endswith("/")
    has_suffix = suffix_of(name) in SUFFIXES
    return has_prefix or has_suffix or glob.has_magic(name) or Path(name).exists()


def is_compressed(file: Path) -> bool:
    """Whether the size of a file tells nothing about the size of its text."""
    return COMPRESSION.search(file.name) is not None or file.suffix in (PARQUET, ARROW)


def files_named(name: str) -> list[Path]:
    """Return the files that a file, folder or glob names, those of a folder at any depth but for hidden ones. In a
    folder with files of rows, files about them are not read. A file that is named, without a suffix, is text. Raise
    DataError if there are no files, none of a kind that is read, or rows of several splits in a folder.
    """
    path = Path(name).expanduser()
    if path.is_file():
        found = [path]
        files = [path] if suffix_of(path.name) in (*SUFFIXES, "") else []
    else:
        pattern = f"{glob.escape(str(path))}/**" if path.is_dir() else str(path)
        found = sorted(map(Path, glob.iglob(pattern, recursive=True)))
        files = [file for file in found if suffix_of(file.name) in SUFFIXES and file.is_file() and _is_part(file)]
    if path.is_dir() and any(suffix_of(file.name) in TABLE_SUFFIXES for file in files):
        files = [file for file in files if not ABOUT_ROWS.fullmatch(file.name)]
        rows = [file for file in files if suffix_of(file.name) in TABLE_SUFFIXES]
        splits = {_split_of(str(file.relative_to(path))) for file in rows} - {""}
        if len(splits) > 1:
            raise DataError(f"{name}: holds the splits {', '.join(sorted(splits))}; name the folder or files of one")
    if not found:
        raise DataError(f"{name}: no such file or folder; correct the path")
    if not files:
        raise DataError(f"{name}: holds no readable file ({KINDS}); name other files")
    return files


def unread_documents(name: str) -> str:
    """Return a line on documents in a folder that are not read, such as PDF; empty if there are none."""
    formatted = [file for file in Path(name).expanduser().rglob("*") if file.suffix.lower() in FORMATTED_SUFFIXES]
    suffixes = sorted({file.suffix.lower() for file in formatted})
    line = f"{name}: files that are not read: {len(formatted):,} ({', '.join(suffixes)}); convert them to .txt"
    return line if formatted else ""


def _split_of(name: str) -> str:
    """Return the split of a file by its name in a folder, the last one that is named, as in train/dev.jsonl."""
    split = ""
    for found in SPLIT.finditer(name):
        split = found[1] or found[2] or "validation"
    return split.lower()


def _is_part(file: Path) -> bool:
    """Whether a file is part of its data set: beside the saved shards, which `state.json` lists, `datasets` leaves
    caches, and shards of an older version.
    """
    state = file.with_name("state.json")
    if suffix_of(file.name) != ARROW or not state.is_file():
        return True
    return json.dumps(file.name).encode() in state.read_bytes()


def fingerprint(files: Iterable[Path]) -> str:
    """Return a SHA-256 of the paths, sizes and modification times of files; their content is not read."""
    states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return digest_of(states)


def rows_in(file: File, name: str, columns: Sequence[str]) -> Iterator[NamedJson]:
    """Yield `(name:row, row)` for every row of a file; a file of text is one row with the column `text`. Raise
    DataError that names the row if a row cannot be read.
    """
    row_name = name
    if suffix_of(file.name) in TABLE_SUFFIXES:
        row_name = f"{name}:1"
    try:
        for next_number, row in enumerate(_rows(file, columns), 2):
            if not isinstance(row, dict):
                raise ValueError("the row does not have one value for each column")
            # Half of a character, or a byte that is not UTF-8, cannot be encoded.
            json.dumps([row.get(column) for column in columns], ensure_ascii=False, default=str).encode()
            yield row_name, row
            row_name = f"{name}:{next_number}"
    except (OSError, EOFError, ValueError, lzma.LZMAError, csv.Error) as error:
        raise DataError(
            f"{row_name}: cannot be read ({first_line(error)}); correct it, save it as UTF-8, or download it again"
        ) from None


def _rows(file: File, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a file by its suffix. `datasets` reads these formats too, but takes "NA" in CSV for a missing
    value and a date in JSON for no text, shifts the columns of a CSV file with an extra cell in each row, and names no
    row that is broken (5.2).
    """
    suffix = suffix_of(file.name)
    if suffix == PARQUET:
        import pyarrow.parquet  # takes a second, and journals import this file

        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            _check_names(names, columns)
            # All columns are read of chats, and if one is missing, so that a message can name them.
            readable = set(names).difference(CHAT_COLUMNS)
            columns_read = list(columns) if readable.issuperset(columns) else None
            for batch in table.iter_batches(256, columns=columns_read):
                yield from batch.to_pylist()
        return
    if suffix == ARROW:
        import pyarrow

        with pyarrow.OSFile(str(file)) as stream:
            if stream.read(len(ARROW_FILE_MARK)) != ARROW_FILE_MARK:
                stream.seek(0)
            for batch in pyarrow.ipc.open_stream(stream):
                yield from batch.to_pylist()
        return
    # The line ends in a cell of CSV are kept.
    with decoded(_opened(file), newline="" if suffix in DELIMITERS else None) as stream:
        if suffix in DELIMITERS:
            csv.field_size_limit(sys.maxsize)  # a cell may hold a whole report
            rows = csv.DictReader(stream, delimiter=DELIMITERS[suffix], strict=True)
            _check_names(rows.fieldnames or [], columns)
            for row in rows:
                has_every_cell = None not in row and None not in row.values()
                yield row if has_every_cell else None
        elif suffix in TABLE_SUFFIXES:
            lines = filter(str.strip, stream)
            first = next(lines, "[]")
            if first.lstrip().startswith("["):
                yield from json.loads(first + "".join(lines))
            elif first.strip() == "{":
                yield from _pretty_printed(first + "".join(lines))
            else:
                yield from map(json.loads, itertools.chain([first], lines))
        else:
            yield {"text": stream.read()}


def _pretty_printed(text: str) -> Iterator[Any]:
    """Yield objects of JSON over several lines, one after the other."""
    decoder = json.JSONDecoder()
    text = text.rstrip()
    end = 0
    while end < len(text):
        while text[end].isspace():
            end += 1
        value, end = decoder.raw_decode(text, end)
        yield value


def _check_names(names: Sequence[str], columns: Sequence[str]) -> None:
    for column in columns:
        if names.count(column) > 1:
            raise ValueError(f"several columns have the name {column}")


def _opened(file: Any) -> Any:
    """Open a file to be read without its compression."""
    import pyarrow

    suffix = file.suffix.lower()
    if suffix == ".xz":
        return lzma.open(file)
    return pyarrow.input_stream(file.open("rb"), compression=COMPRESSIONS.get(suffix))


def decoded(stream: Any, newline: str | None = None) -> io.TextIOWrapper:
    """Decode UTF-8, or UTF-16 with a byte order mark. Other bytes become lone surrogates, so that their row can be
    named. Raise ValueError for UTF-16 without a mark, and for UTF-32.
    """
    buffer = io.BufferedReader(stream)
    start = buffer.peek(4)[:4]
    if start.count(0) > 1:
        raise ValueError("it begins with zeros, as UTF-16 does without a byte order mark")
    encoding = "utf-16" if start.startswith(UTF16_MARKS) else "utf-8-sig"
    return io.TextIOWrapper(buffer, encoding, errors="surrogateescape", newline=newline)


def read_document(name: str) -> str:
    """Return the text of a file, or of standard input (`-`). Raise DataError if there is no text."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        text = decoded(io.BytesIO(content)).read()
        text.encode()
    except (OSError, ValueError) as error:
        raise DataError(f"{name}: cannot be read ({first_line(error)}); name a file of text, or - ") from None
    if not text.strip():
        raise DataError(f"{name}: holds no text; name a file of text")
    return text
