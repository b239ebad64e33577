"""Rows of local files, each with what names it in an error: JSON lines, Parquet and CSV."""

import csv
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pi_lora.errors import DataError

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
