"""The tables of docs/performance.md and of benchmarks/README.md, from the rows of benchmarks/gpu.py."""

from collections.abc import Callable, Collection, Iterator, Mapping
from statistics import fmean
from typing import Any

import record  # first: it finds scripts/
from pages import machines_of, table
from pi_lora.planning.gpus import GIB

# A row, with its name as `name`, the first row of its part as `first`, and the card's product as `most`.
Row = Mapping[str, Any]
Cell = Callable[[Row], object]

TERA = 1e12
# Operations a second of a dense bfloat16 product by the data sheets of H100 SXM and H200, the usual base of MFU.
DATA_SHEET = 989e12


def trainings() -> Iterator[str]:
    """The stored rows of trainings."""
    yield from tables(record.read("gpu/NVIDIA H200"), [part for part in PARTS if part not in KERNELS])


def kernels() -> Iterator[str]:
    """The stored rows of kernels."""
    yield from tables(record.read("gpu/NVIDIA H200"), KERNELS)


def tables(parts: Mapping[str, Mapping[str, Row]], shown: Collection[str] | None = None) -> Iterator[str]:
    """A table for each part that has rows, of all or of those in `shown`, and a line for each row that failed."""
    shown = PARTS if shown is None else shown
    every = {f"{part}, {name}": row for part in shown for name, row in parts.get(part, {}).items()}
    yield from machines_of(every)
    most = parts["ceilings"]["product"].get("product")
    for part in shown:
        title, columns = PARTS[part]
        rows = {name: row for name, row in parts.get(part, {}).items() if "failed" not in row}
        if rows:
            first, *_ = rows.values()
            cells = []
            for name, row in rows.items():
                known = {**row, "name": name, "first": first, "most": most}
                cells.append([cell(known) for cell in columns.values()])
            yield f"\n### {title}\n"
            yield from table(tuple(columns), cells)
    for name, row in every.items():
        if "failed" in row:
            yield f"\nFailed ({name}): `{row['failed']}`"


def tokens_per_second(row: Row) -> float:
    """Of the steps after the first, which warms up; 0 where memory was too little."""
    _, *seconds = row.get("step_seconds", [0])
    return row["tokens"] / fmean(seconds) if seconds else 0.0


def speed(row: Row) -> str:
    """Tokens a second, or that memory was too little."""
    tokens = tokens_per_second(row)
    return f"{tokens:,.0f}" if tokens else "out of memory"


def compared(row: Row) -> str:
    """Tokens a second as a share of the first row's."""
    first = tokens_per_second(row["first"])
    return f"{tokens_per_second(row) / first:.2f}" if first else ""


def share(row: Row, ceiling: float | None, *kinds: str) -> str:
    """Which share of a ceiling the operations of these kinds are."""
    operations = sum(row["flops"][kind] for kind in kinds) / row["tokens"]
    return f"{operations * tokens_per_second(row) / ceiling:.1%}" if ceiling else ""


def peak(row: Row) -> str:
    """The most that the allocator gave out since training began."""
    return f"{row['peak_bytes'] / GIB:.1f} GiB" if "peak_bytes" in row else "not measured"


def off_by(row: Row) -> str:
    """How far the plan is from the peak."""
    return f"{row['planned_bytes'] / row['peak_bytes'] - 1:+.0%}" if "peak_bytes" in row else ""


def by_kernel(row: Row) -> str:
    """Seconds forward, seconds of both ways, and the peak of each kernel."""
    cells = [
        f"{name}: {cost['forward']:.3f}, {cost['both_ways']:.3f}, {peak(cost)}" for name, cost in row["kernels"].items()
    ]
    return "; ".join(cells)


def change(row: Row) -> str:
    """The key of the recipe that differs."""
    key = row["name"].replace("=", ": ")
    return key if key == "none" else f"`{key}`"


def name(row: Row) -> str:
    """The name of a row."""
    return str(row["name"])


TOKENS: dict[str, Cell] = {"tokens": lambda row: f"{row['tokens']:,}"}
SPEED: dict[str, Cell] = {"tokens/s": speed}
COSTS: dict[str, Cell] = {
    "MFU": lambda row: share(row, DATA_SHEET, "forward", "backward"),
    "% of measured GEMM peak": lambda row: share(row, row["most"], "forward", "backward"),
    "with recomputation": lambda row: share(row, DATA_SHEET, "forward", "backward", "recomputation"),
    "peak": peak,
    "planned": lambda row: f"{row['planned_bytes'] / GIB:.3g} GiB",
    "off by": off_by,
}
PARTS: dict[str, tuple[str, dict[str, Cell]]] = {
    "ceilings": (
        "The card's ceiling",
        {"bfloat16 product, TFLOP/s": lambda row: f"{row['product'] / TERA:.0f} ({row['product_side']} squared)"},
    ),
    "attention": (
        "Layers with sliding windows, sinks and soft caps",
        {"layers of": name, **TOKENS, "seconds forward, both ways, and peak": by_kernel},
    ),
    "training": ("Training", {"method": name, **TOKENS, **SPEED, **COSTS}),
    "neighbours": ("Other tools", {"": name, **TOKENS, **SPEED, "vs. pi-lora": compared, "peak": peak}),
    "levers": ("The effect of each key of the recipe", {"change": change, **SPEED, "vs. none": compared, **COSTS}),
}
# Parts that decide settings of the code; no key of a recipe has them.
KERNELS = ("ceilings", "attention")
