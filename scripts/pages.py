"""The parts of documentation that scripts write: tables, and blocks of pages between two comments."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield table_line(head)
    yield "|" + "---|" * len(head)
    for cells in rows:
        yield table_line(cells)


def table_line(cells: Sequence[object]) -> str:
    """One line of a Markdown table."""
    texts = [str(cell) for cell in cells]
    return f"| {' | '.join(texts)} |"


def made_on(machine: Mapping[str, Any]) -> str:
    """The hardware, versions and day of a measurement."""
    device = machine["gpu"] or f"{machine['cores']} cores of {machine['processor']}"
    return f"{device}; {machine['versions']}; {machine['date']}."


def machines_of(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Where and when rows were measured: a line for each machine, with the names of its rows if there are several."""
    names: dict[str, list[str]] = {}
    for name, row in rows.items():
        line = made_on(row["machine"])
        names.setdefault(line, []).append(name)
    for line, measured in names.items():
        if len(names) == 1:
            yield line
        else:
            yield f"{', '.join(measured)}: {line}"


def mean_and_range(values: Sequence[float], style: str) -> str:
    """The mean, and of runs that differ the least and the most."""
    mean = format(fmean(values), style)
    least = format(min(values), style)
    most = format(max(values), style)
    return mean if least == most else f"{mean} ({least} to {most})"


def block(page: Path, name: str) -> str:
    """The text between `<!-- name -->` and `<!-- end of name -->` in a page."""
    return _parts(page, name)[1]


def write_block(page: Path, name: str, text: str) -> None:
    """Replace what stands there."""
    before, _, after = _parts(page, name)
    page.write_text(before + text + after, encoding="utf-8")


def _parts(page: Path, name: str) -> list[str]:
    parts = re.split(rf"(?<=<!-- {name} -->\n)|(?=<!-- end of {name} -->\n)", page.read_text(encoding="utf-8"))
    assert len(parts) == 3, f"{page}: has no block of {name}"
    return parts
