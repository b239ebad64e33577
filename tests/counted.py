"""What was tried is counted, over all processes of the tests, and printed at the end."""

from collections import defaultdict
from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tried: dict[str, list[tuple[int, float, float, int]]] = defaultdict(list)
    reports: list[Any] = [each for found in terminalreporter.stats.values() for each in found]
    for report in reports:
        for name, told in getattr(report, "user_properties", ()) if getattr(report, "when", "") == "call" else ():
            if name == "tried":
                what, *numbers = told
                tried[what].append(tuple(numbers))
    if not tried:
        return
    terminalreporter.section("what was tried")
    rows = [("", "cases", "seconds", "longest (s)", "memory (MB)")]
    rows += [_row(what, parts) for what, parts in tried.items()]
    for group in dict.fromkeys(what.partition(": ")[0] for what in tried):
        rows.append(
            _row(
                f"all of {group}",
                [part for what, parts in tried.items() if what.startswith(f"{group}: ") for part in parts],
            )
        )
    width = max(len(row[0]) for row in rows)
    for what, *cells in rows:
        terminalreporter.write_line(f"{what:{width}}" + "".join(f"{cell:>13}" for cell in cells))


def _row(what: str, parts: list[tuple[int, float, float, int]]) -> tuple[str, ...]:
    cases, seconds, longest, memory = zip(*parts, strict=True)
    return what, f"{sum(cases):,}", f"{sum(seconds):,.1f}", f"{max(longest):.2f}", f"{max(memory) / 1e6:,.0f}"
