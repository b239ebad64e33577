"""The tables of the paper in small, from the result of benchmarks/paper_in_small.py."""

from collections.abc import Iterator, Mapping
from typing import Any

Result = Mapping[str, Any]
NOTHING = """**Not run yet: no GPU was at hand.** To fill this in: `python benchmarks/paper_in_small.py`, then
`python benchmarks/tables.py`.
"""
SCALINGS = {"pi": "PI", "direct": "FT"}


def tables(result: Result) -> Iterator[str]:
    """Markdown: the paper's tables 1, 3 and 4, and where the curves of the last two are."""
    yield from table_1(result)
    yield from by_steps("### Perplexity at the target, by steps (the paper's table 3)", result, at_target)
    yield from by_steps("### `k_max` by steps (the paper's table 4)", result, lambda row, at: f"{at['k_max']:,}")
    yield "![Perplexity and k_max by steps, for each target](paper_in_small.png)\n"


def table_1(result: Result) -> Iterator[str]:
    """Perplexity by window after the last step; the base beside."""
    windows = list(result["base"]["perplexity"])
    yield "### Perplexity by window (the paper's table 1)\n"
    yield from header("window", "by", "weights", *(f"{int(window):,}" for window in windows))
    base = result["base"]["perplexity"]
    yield line(f"{result['window']:,}", "none", "", *(f"{base[window]:.2f}" for window in windows))
    for row in result["rows"]:
        found = row["steps"][-1]["perplexity"]
        yield line(*about(row), *(f"{found[window]:.2f}" if window in found else "" for window in windows))
    yield ""


def by_steps(title: str, result: Result, cell: Any) -> Iterator[str]:
    """A row for each extension, a column for each step that was measured."""
    steps = [each["step"] for each in result["rows"][0]["steps"]]
    yield f"{title}\n"
    yield from header("window", "by", "weights", *(f"{step:,}" for step in steps))
    for row in result["rows"]:
        yield line(*about(row), *(cell(row, at) for at in row["steps"]))
    yield ""


def at_target(row: Result, at: Result) -> str:
    """Perplexity at the row's own target."""
    return f"{at['perplexity'][str(row['target'])]:.2f}"


def about(row: Result) -> tuple[str, str, str]:
    """Target, the paper's name of the scaling, and what is tuned."""
    return f"{row['target']:,}", SCALINGS[row["scaling"]], row["method"]


def header(*cells: str) -> Iterator[str]:
    """The head of a table."""
    yield line(*cells)
    yield "|" + "---|" * len(cells)


def line(*cells: str) -> str:
    """A row of a table."""
    return "| " + " | ".join(cells) + " |"
