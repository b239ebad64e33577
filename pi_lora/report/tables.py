"""Scores as tables, on the terminal and in Markdown."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

Scores = Mapping[str, Any]


def comparison_table(rows: Mapping[str, tuple[Scores, Scores]]) -> Table:
    """Several models side by side: perplexity at every window, and k_max."""
    windows = [row["window"] for row in next(iter(rows.values()))[0]["windows"]]
    table = Table()
    table.add_column("model")
    for window in windows:
        table.add_column(f"ppl {window}", justify="right")
    table.add_column("k_max", justify="right")
    for name, (perplexity, passkey) in rows.items():
        found = [f"{row['perplexity']:.2f}" for row in perplexity["windows"]]
        table.add_row(name, *found, str(passkey["k_max"]))
    return table


def markdown_table(rows: Mapping[str, tuple[Scores, Scores]]) -> str:
    """`comparison_table` as Markdown."""
    windows = [row["window"] for row in next(iter(rows.values()))[0]["windows"]]
    lines = ["| model | " + " | ".join(f"perplexity at {window}" for window in windows) + " | k_max |"]
    lines.append("|---" * (len(windows) + 2) + "|")
    for name, (perplexity, passkey) in rows.items():
        found = " | ".join(f"{row['perplexity']:.2f}" for row in perplexity["windows"])
        lines.append(f"| {name} | {found} | {passkey['k_max']} |")
    return "\n".join(lines) + "\n"
