"""One document of a user's: a text file, a PDF, or what comes from standard input."""

import importlib.util
import sys
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from pi_lora.data.documents import (
    CSV,
    csv_rows,
    files_named,
    fingerprint,
    json_line,
    json_rows,
    looks_local,
    parquet_columns,
    parquet_rows,
    text_of,
)
from pi_lora.errors import DataError, PiLoraError
from pi_lora.recipe.schema import Source

STDIN = "-"
PDF = ".pdf"


def read_document(name: str) -> str:
    """The text of a file, or with `-` of standard input.

    Raises:
        DataError: it is not there, holds no text, or is neither UTF-8 nor a PDF.
        PiLoraError: it is a PDF, and pypdf is not installed.
    """
    if name == STDIN:
        text = _decoded(sys.stdin.buffer.read(), "standard input")
    elif name.lower().endswith(PDF):
        text = _pdf(Path(name).expanduser())
    else:
        text = _decoded(_bytes(Path(name).expanduser()), name)
    if not text.strip():
        more = "; scanned pages hold pictures, recognize their text first" if name.lower().endswith(PDF) else ""
        raise DataError(f"{name}: holds no text{more}")
    return text


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); name a .txt, .md or .pdf file, or - ") from None


def _decoded(content: bytes, name: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{name}: is not UTF-8 text; convert it, or name a .pdf") from None
    if "\0" in text:
        raise DataError(f"{name}: is a binary file; name a .txt, .md or .pdf file")
    return text


def _pdf(file: Path) -> str:
    """The text of all pages, a blank line between them."""
    if importlib.util.find_spec("pypdf") is None:
        raise PiLoraError(f"{file}: PDF needs the package pypdf; pip install 'pi-lora[pdf]'")
    import pypdf
    from pypdf.errors import PyPdfError

    _bytes(file)
    try:
        return "\n\n".join(page.extract_text() for page in pypdf.PdfReader(file).pages)
    except (PyPdfError, ValueError, KeyError, TypeError) as error:  # what damaged files raise
        raise DataError(f"{file}: is no whole PDF ({error}); fetch it again, or give its text") from None


SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", CSV)
# Its loader is a script, which `datasets` no longer runs; the script reads `SPLIT.jsonl` out of `SUBSET.zip`.
SCROLLS = "tau/scrolls"

Texts = dict[str, str]
# What names a row in a message, and its texts by column.
NamedRow = tuple[str, Texts]


class Table(ABC):
    """A source that was found; its rows are read as they are asked for."""

    name: str

    @abstractmethod
    def read(self, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Every row in a fixed order, with at least those of `columns` that there are."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What decides the rows, as JSON: a cache made from them is stale when this changes."""

    def rows(self, columns: Sequence[str]) -> Iterator[NamedRow]:
        """The texts in `columns` of every row; an absent value is an empty text.

        Raises:
            DataError: (while reading) it cannot be read, lacks a column, or one holds something else than text.
        """
        for where, row in self.read(columns):
            if missing := [column for column in columns if column not in row]:
                raise _no_columns(where, missing, row)
            yield where, {column: text_of(row, column, where) for column in columns}


class LocalTable(Table):
    """Rows of `.jsonl`, `.parquet` and `.csv`: a file, those of a folder, or those of a glob."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.files = files_named(name, SUFFIXES)
        if strange := [str(file) for file in self.files if not file.name.lower().endswith(SUFFIXES)]:
            raise DataError(f"{strange[0]}: holds no rows with columns; name {', '.join(SUFFIXES)} files")

    def identity(self) -> dict[str, Any]:
        """The files with their sizes and times of change."""
        return {"files": len(self.files), "sha256": fingerprint(self.files)}

    def read(self, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """File after file, row after row."""
        for file in self.files:
            try:
                yield from _rows_of(file, columns)
            except (OSError, EOFError) as error:
                raise DataError(f"{file}: cannot be read ({error}); check its permissions, or fetch it again") from None


class HubTable(Table):
    """A split of a hub data set."""

    def __init__(self, source: Source) -> None:
        # `datasets` takes a second to import, and local rows do without.
        from pi_lora.data.hub import HubDataset

        self.name, self.dataset = source.name, HubDataset(source)

    def identity(self) -> dict[str, Any]:
        """The commit."""
        return self.dataset.identity()

    def read(self, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Row after row, each named by its number."""
        for number, row in enumerate(self.dataset.rows(columns), 1):
            yield f"{self.name}:{number}", row


class ScrollsTable(Table):
    """A task of SCROLLS (Shaham et al. 2022) in its own version, as the paper uses GovReport: `input` and `output`."""

    def __init__(self, source: Source) -> None:
        if source.subset is None:
            raise DataError(f"{SCROLLS}: has several subsets; set subset, as gov_report")
        self.name, self.source = f"{SCROLLS}/{source.subset}", source

    def identity(self) -> dict[str, Any]:
        """The revision; a branch may move, a commit does not."""
        return {"revision": self.source.revision}

    def read(self, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Line after line of the split's file."""
        inside = f"{self.source.subset}/{self.source.split}.jsonl"
        with zipfile.ZipFile(self._fetched()) as archive:
            if inside not in archive.namelist():
                raise DataError(f"{self.name}: has no split {self.source.split}; there are train, validation and test")
            with archive.open(inside) as lines:
                for number, line in enumerate(lines, 1):
                    where = f"{self.name}/{self.source.split}:{number}"
                    yield where, json_line(line, where, columns[0])

    def _fetched(self) -> Path:
        file = f"{self.source.subset}.zip"
        try:
            return Path(hf_hub_download(SCROLLS, file, repo_type="dataset", revision=self.source.revision))
        except (OSError, HfHubHTTPError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise DataError(
                f"{self.name}: {file} cannot be had from the hub ({reason}); "
                "check the subset and the network, or name local files instead"
            ) from None


def find_table(source: Source) -> Table:
    """The rows that `source` names, before they are read.

    Raises:
        DataError: nothing is there; of a hub data set that shows when it is read.
    """
    if source.name.startswith("builtin:"):
        raise DataError(f"{source.name}: is text to pack, without columns; name files or a data set with rows")
    if source.name == SCROLLS:
        return ScrollsTable(source)
    return LocalTable(source.name) if looks_local(source.name) else HubTable(source)


def _rows_of(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    name = file.name.lower()
    if name.endswith(CSV):
        yield from csv_rows(file)
    elif name.endswith(".parquet"):
        there = parquet_columns(file)
        if missing := [column for column in columns if column not in there]:
            raise _no_columns(str(file), missing, there)
        yield from parquet_rows(file, columns)
    else:
        yield from json_rows(file, columns[0])


def _no_columns(where: str, missing: Sequence[str], there: Sequence[str] | Mapping[str, Any]) -> DataError:
    return DataError(f"{where}: has no column {' and no '.join(missing)}; name columns of {', '.join(there)}")
