"""The tables of docs/performance.md, from the rows of benchmarks/gpu.py."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import record  # first: it finds scripts/
from pages import made_on, table

Row = Mapping[str, Any]

GIB = 2**30
TERA = 1e12
# Operations a second of a dense bfloat16 product by the data sheets of H100 SXM and H200, the usual base of MFU.
DATA_SHEET = 989e12


def measured() -> Iterator[str]:
    """The tables of the stored rows."""
    yield from tables(record.read("gpu"))


def tables(result: Mapping[str, Any]) -> Iterator[str]:
    """A table for each part that has rows, and a line for each row that failed."""
    rows = result["rows"]
    yield from sorted({made_on(row["machine"]) for row in rows})
    product = next((row["product"] for row in rows if "product" in row), None)
    for part, (title, columns) in PARTS.items():
        done = [{"product": product, **row} for row in rows if row["part"] == part and "failed" not in row]
        if done:
            yield f"\n### {title}\n"
            lines = [[cell(row) for cell in columns.values()] for row in with_first(done)]
            yield from table(tuple(columns), lines)
    for row in rows:
        if "failed" in row:
            job = [f"{key} {row[key]}" for key in ("part", "method", "tokens", "contender") if key in row]
            yield f"\nFailed ({', '.join(job)}): `{row['failed']}`"


def with_first(rows: Sequence[Row]) -> list[Row]:
    """Add to each row the first one with the same method, pi-lora with nothing changed: speeds are compared with it."""
    first: dict[str | None, Row] = {}
    for row in rows:
        first.setdefault(row.get("method"), row)
    return [{**row, "first": first[row.get("method")]} for row in rows]


def tokens_per_second(row: Row) -> float | None:
    """Of the steps after the first, which warms up; None where memory was too little."""
    seconds = row.get("step_seconds", [])[1:]
    return tokens_per_step(row) / fmean(seconds) if seconds else None


def tokens_per_step(row: Row) -> int:
    """The tokens of all sequences of a step."""
    return int(row["sequences"] * row["tokens"])


def speed(row: Row) -> str:
    """Tokens a second, or that memory was too little."""
    if "step_seconds" not in row:
        return "out of memory"
    return f"{tokens_per_second(row) or 0:,.0f}"


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
        operations = sum(row["flops"][kind] for kind in kinds) / tokens_per_step(row)
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
    """The keys of the recipe that differ, or the contender."""
    if "changes" not in row:
        return str(row["contender"])
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


METHOD: dict[str, Callable[[Row], object]] = {
    "method": lambda row: row["method"],
    "tokens": lambda row: f"{row['sequences']} x {row['tokens']:,}",
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
        {
            "layers of": lambda row: row["model"],
            "tokens": lambda row: f"{row['tokens']:,}",
            "seconds forward, both ways, and peak": by_kernel,
        },
    ),
    "training": (
        "Training",
        {
            **METHOD,
            "layers": lambda row: row["layers"],
            **COSTS,
        },
    ),
    "neighbours": (
        "Other tools",
        {"": lambda row: row["contender"], **METHOD, "vs. pi-lora": compared, "peak": peak},
    ),
    "levers": (
        "The effect of each key of the recipe",
        {
            "change": change,
            "tokens/s": speed,
            "vs. none": compared,
            **COSTS,
        },
    ),
    "longest": (
        "Beyond Unsloth's longest sequences, QLoRA of rank 32",
        {
            "memory": lambda row: f"{row['cap']:g} GB" if row["cap"] else "the whole card",
            "tokens": lambda row: f"{row['tokens']:,}",
            "a step": lambda row: f"{row['step_seconds'][-1]:.0f} s" if "step_seconds" in row else "out of memory",
        },
    ),
    "demo": (
        "The demo's recipe, start to finish",
        {"steps": lambda row: row["steps"], "seconds": lambda row: f"{row['seconds']:.1f}"},
    ),
}
