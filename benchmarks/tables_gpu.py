"""The tables of docs/performance.md, from the rows of benchmarks/gpu.py."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pages import made_on, table

Row = Mapping[str, Any]

GIB = 2**30
# Operations a second of a dense bfloat16 product by the data sheets of H100 SXM and H200, the usual base of MFU.
DATA_SHEET = 989e12
# The README of unslothai/unsloth, Llama-3.1-8B, QLoRA of rank 32, batch 1: tokens by GB of the card.
UNSLOTH_LONGEST = {24: 78_475, 48: 191_728, 80: 342_733}


def tables(result: Mapping[str, Any]) -> Iterator[str]:
    """A table for each part that has rows."""
    rows = result["rows"]
    yield from sorted({made_on(row["machine"]) for row in rows})
    product = next((row["product"] for row in rows if "product" in row), None)
    for part, write in PARTS.items():
        if done := [row for row in rows if row["part"] == part and "failed" not in row]:
            yield from ("", *write(done, product))
    for row in rows:
        if "failed" in row:
            asked = ", ".join(f"{key} {row[key]}" for key in ("part", "method", "tokens", "contender") if key in row)
            yield f"\nFailed ({asked}): `{row['failed']}`"


def ceilings(rows: Sequence[Row], product: float | None) -> Iterator[str]:
    """The best of the card by itself."""
    yield "### The card's ceilings\n"
    row = rows[-1]
    attention = [(f"attention, {name}", f"{each / 1e12:.1f} TFLOP/s") for name, each in row["attention"].items()]
    squared = f"bfloat16 product, {row['product_side']} squared"
    reached = [(squared, f"{row['product'] / 1e12:.1f} TFLOP/s"), ("copy", f"{row['copy'] / 1e9:.1f} GB/s")]
    yield from table(("", "reached"), [*reached, *attention])


def training(rows: Sequence[Row], product: float | None) -> Iterator[str]:
    """A length of a method a row; MFU counts what forward and backward need, without recomputation."""
    yield "### Training\n"
    head = ("method", "layers", "tokens", "tokens/s", "MFU", "of the measured product", "with recomputation")
    cells = []
    for row in rows:
        own = row["flops"]["forward"] + row["flops"]["backward"]
        everything = own + row["flops"]["recomputation"]
        shares = (share(row, own, DATA_SHEET), share(row, own, product), share(row, everything, product))
        planned, peak = row["planned_bytes"], row.get("peak_bytes")
        memory = (peak_of(row), f"{planned / GIB:.3g} GiB", f"{planned / peak - 1:+.0%}" if peak else "")
        about = (row["method"], row["layers"], f"{row['sequences']} x {row['tokens']:,}")
        cells.append((*about, speed_of(row), *shares, *memory))
    yield from table((*head, "peak", "planned", "off by"), cells)


def share(row: Row, operations: float, per_second: float | None) -> str:
    """Which share of a ceiling `operations` a step are."""
    seconds = seconds_per_step(row)
    return f"{operations / seconds / per_second:.1%}" if seconds and per_second else ""


def seconds_per_step(row: Row) -> float | None:
    """The mean of the steps after the first, which warms up; None where memory was too little."""
    steps = row.get("step_seconds", [])
    return sum(steps[1:]) / len(steps[1:]) if len(steps) > 1 else None


def tokens_per_second(row: Row) -> float | None:
    seconds = seconds_per_step(row)
    return row["sequences"] * row["tokens"] / seconds if seconds else None


def speed_of(row: Row) -> str:
    """Tokens a second, or that memory was too little."""
    speed = tokens_per_second(row)
    return f"{speed:,.0f}" if speed else "out of memory"


def beside(row: Row, first: Row | None) -> str:
    """Tokens a second as a share of another row's."""
    speeds = tokens_per_second(row), tokens_per_second(first) if first else None
    return f"{speeds[0] / speeds[1]:.2f}" if speeds[0] and speeds[1] else ""


def peak_of(row: Row) -> str:
    """The most that the allocator gave out since training began."""
    return f"{row['peak_bytes'] / GIB:.1f} GiB" if "peak_bytes" in row else "not measured"


def neighbours(rows: Sequence[Row], product: float | None) -> Iterator[str]:
    """A contender a row; the same shape, tokens, method and rank, an adapter alone."""
    yield "### The neighbours\n"
    ours = {row["method"]: row for row in rows if row["contender"] == "pi-lora"}
    cells = []
    for row in rows:
        about = (row[key] for key in ("contender", "method", "tokens"))
        cells.append((*about, speed_of(row), beside(row, ours.get(row["method"])), peak_of(row)))
    yield from table(("", "method", "tokens", "tokens/s", "beside pi-lora", "peak"), cells)


def levers(rows: Sequence[Row], product: float | None) -> Iterator[str]:
    """A change of the recipe a row, beside no change."""
    yield "### The effect of each key of the recipe\n"
    none = next((row for row in rows if row.get("changes") == {}), None)
    cells = []
    for row in rows:
        keys = [
            f"`{section}.{key}: {str(value).lower()}`"
            for section, values in row.get("changes", {}).items()
            for key, value in values.items()
        ]
        name = " ".join(keys) if keys else "none" if row is none else row["contender"]
        cells.append((name, speed_of(row), beside(row, none), peak_of(row)))
    yield from table(("change", "tokens/s", "beside none", "peak"), cells)


def longest(rows: Sequence[Row], product: float | None) -> Iterator[str]:
    """The longest sequence under each cap that ran a whole step, and Unsloth's published one."""
    yield "### The longest sequence, QLoRA of rank 32\n"
    cells = []
    for cap in dict.fromkeys(row["cap"] for row in rows):
        tried = {row["tokens"]: "step_seconds" in row for row in rows if row["cap"] == cap}
        ran, failed = (
            [f"{tokens:,}" for tokens in sorted(tried) if tried[tokens] == wanted] for wanted in (True, False)
        )
        published = UNSLOTH_LONGEST.get(round(cap or 0))
        memory = f"{cap:g} GB" if cap else "the whole card"
        cells.append(
            (memory, (ran or ["none"])[-1], (failed or ["not found"])[0], f"{published:,}" if published else "")
        )
    yield from table(("memory", "ran", "too long", "Unsloth's published, 8B"), cells)


def evaluation(rows: Sequence[Row], product: float | None) -> Iterator[str]:
    """Perplexity by window, and grids of passkeys."""
    yield "### Measuring\n"
    cells = []
    for row in rows:
        if row["measure"] == "perplexity":
            name = f"perplexity at {row['tokens']:,}, stride {row['stride']}"
            cells.append((name, f"{row['pi_lora']:,.0f} tokens/s", f"{row['yarn']:,.0f} tokens/s (YaRN's)", ""))
        else:
            name = f"{row['depths']} x {row['trials']} passkeys in {row['tokens']:,} tokens"
            other = f"{row['longlora']:.1f} s (LongLoRA's)" if "longlora" in row else ""
            cells.append((name, f"{row['pi_lora']:.1f} s", other, peak_of(row)))
    yield from table(("", "pi-lora", "the neighbour's way", "peak"), cells)


def demo(rows: Sequence[Row], product: float | None) -> Iterator[str]:
    """One sentence."""
    yield f"`pi-lora train demo`, {rows[-1]['steps']} steps: {rows[-1]['seconds']:.1f} s, start to finish."


PARTS = {
    "ceilings": ceilings,
    "training": training,
    "neighbours": neighbours,
    "levers": levers,
    "longest": longest,
    "evaluation": evaluation,
    "demo": demo,
}
