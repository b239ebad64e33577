"""The tables of docs/performance.md, from the rows of benchmarks/gpu.py."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import record  # first: it finds scripts/
from pages import made_on, table
from pi_lora.planning.gpus import GIB

Row = Mapping[str, Any]

TERA = 1e12
# Operations a second of a dense bfloat16 product by the data sheets of H100 SXM and H200, the usual base of MFU.
DATA_SHEET = 989e12


def measured() -> Iterator[str]:
    """The tables of the stored rows."""
    yield from tables(record.read("gpu")["rows"])


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """A table for each part that has rows, and a line for each row that failed."""
    yield from sorted({made_on(row["machine"]) for row in rows})
    product = next((row["product"] for row in rows if "product" in row), None)
    for part, (title, columns) in PARTS.items():
        done = [{"product": product, **row} for row in rows if row["part"] == part and "failed" not in row]
        if done:
            yield f"\n### {title}\n"
            lines = [[cell({**row, "first": done[0]}) for cell in columns.values()] for row in done]
            yield from table(tuple(columns), lines)
    for row in rows:
        if "failed" in row:
            job = [f"{key} {row[key]}" for key in ("part", "method", "contender") if key in row]
            yield f"\nFailed ({', '.join(job)}): `{row['failed']}`"


def tokens_per_second(row: Row) -> float | None:
    """Of the steps after the first, which warms up; None where memory was too little."""
    seconds = row.get("step_seconds", [])[1:]
    return row["tokens"] / fmean(seconds) if seconds else None


def speed(row: Row) -> str:
    """Tokens a second, or that memory was too little."""
    tokens = tokens_per_second(row)
    return f"{tokens:,.0f}" if tokens else "out of memory"


def compared(row: Row) -> str:
    """Tokens a second as a share of the first row's."""
    mine = tokens_per_second(row)
    first = tokens_per_second(row["first"])
    return f"{mine / first:.2f}" if mine and first else ""


def share(kinds: tuple[str, ...], ceiling: Callable[[Row], float | None]) -> Callable[[Row], str]:
    """A cell: which share of a ceiling the operations of these kinds are."""

    def cell(row: Row) -> str:
        speed = tokens_per_second(row)
        most = ceiling(row)
        operations = sum(row["flops"][kind] for kind in kinds) / row["tokens"]
        return f"{operations * speed / most:.1%}" if speed and most else ""

    return cell


def peak(row: Row) -> str:
    """The most that the allocator gave out since training began."""
    if "peak_bytes" not in row:
        return "not measured"
    return f"{row['peak_bytes'] / GIB:.1f} GiB"


def planned(row: Row) -> str:
    """The most that the plan expects of the allocator."""
    return f"{row['planned_bytes'] / GIB:.3g} GiB"


def off_by(row: Row) -> str:
    """How far the plan is from the peak."""
    if "peak_bytes" not in row:
        return ""
    return f"{row['planned_bytes'] / row['peak_bytes'] - 1:+.0%}"


def change(row: Row) -> str:
    """The keys of the recipe that differ."""
    keys = []
    for section, values in row["changes"].items():
        for key, value in values.items():
            keys.append(f"`{section}.{key}: {str(value).lower()}`")
    return " ".join(keys) or "none"


def attention(row: Row) -> str:
    """Attention forward and backward by kernel."""
    return "; ".join(f"{name} {each / TERA:.0f}" for name, each in row["attention"].items())


def by_kernel(row: Row) -> str:
    """Seconds forward, seconds of both ways, and the peak of each kernel."""
    cells = []
    for name, cost in row["kernels"].items():
        seconds = f"{cost['forward']:.3f}, {cost['both_ways']:.3f}"
        cells.append(f"{name}: {seconds}, {peak(cost)}")
    return "; ".join(cells)


def tokens(row: Row) -> str:
    """The tokens of a sequence."""
    return f"{row['tokens']:,}"


METHOD: dict[str, Callable[[Row], object]] = {
    "method": lambda row: row["method"],
    "tokens": tokens,
    "tokens/s": speed,
}
OWN = ("forward", "backward")
COSTS: dict[str, Callable[[Row], object]] = {
    "MFU": share(OWN, lambda row: DATA_SHEET),
    "% of measured GEMM peak": share(OWN, lambda row: row["product"]),
    "with recomputation": share((*OWN, "recomputation"), lambda row: DATA_SHEET),
    "peak": peak,
    "planned": planned,
    "off by": off_by,
}
PARTS: dict[str, tuple[str, dict[str, Callable[[Row], object]]]] = {
    "ceilings": (
        "The card's ceilings",
        {
            "bfloat16 product, TFLOP/s": lambda row: f"{row['product'] / TERA:.0f} ({row['product_side']} squared)",
            "copy, GB/s": lambda row: f"{row['copy'] / 1e9:.0f}",
            "attention, TFLOP/s": attention,
        },
    ),
    "attention": (
        "Layers with sliding windows, sinks and soft caps",
        {"layers of": lambda row: row["model"], "tokens": tokens, "seconds forward, both ways, and peak": by_kernel},
    ),
    "training": ("Training", {**METHOD, **COSTS}),
    "neighbours": (
        "Other tools",
        {"": lambda row: row["contender"], **METHOD, "vs. pi-lora": compared, "peak": peak},
    ),
    "levers": (
        "The effect of each key of the recipe",
        {"change": change, "tokens/s": speed, "vs. none": compared, **COSTS},
    ),
}
