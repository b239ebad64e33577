"""The parts of documentation that scripts write."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean


def block(page: Path, name: str) -> str:
    """What stands between `<!-- name -->` and `<!-- end of name -->` in a page."""
    return _around(page, name)[1]


def write_block(page: Path, name: str, text: str) -> None:
    """Put `text` there instead."""
    before, _, after = _around(page, name)
    page.write_text(before + text + after, encoding="utf-8")


def mean_and_range(values: Sequence[float], how: str) -> str:
    """The mean, and of runs that differ the least and the most."""
    mean, least, most = (format(value, how) for value in (fmean(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least} to {most})"


def _around(page: Path, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, opening, rest = page.read_text(encoding="utf-8").partition(begin)
    inside, closing, after = rest.partition(end)
    assert closing, f"{page}: has no block of {name}"
    return before + opening, inside, closing + after
