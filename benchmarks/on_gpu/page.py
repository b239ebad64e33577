"""The tables of docs/performance.md, from the result of benchmarks/gpu.py."""

from collections.abc import Iterator, Mapping
from typing import Any

Result = Mapping[str, Any]

GIB = 2**30
# The README of unslothai/unsloth, Llama-3.1-8B, QLoRA of rank 32, batch 1: tokens by GB of the card.
UNSLOTH_LONGEST = {24: 78_475, 48: 191_728, 80: 342_733}
NOTHING = """**Not measured yet: no GPU was at hand.** To fill this in: `python benchmarks/gpu.py`, then
`python benchmarks/tables.py`.
"""


def tables(result: Result) -> Iterator[str]:
    """Markdown: a table for each part that was run."""
    ceiling = (result.get("ceilings") or [{}])[0]
    for part, write in PARTS.items():
        rows = result.get(part)
        if rows:
            yield from write(rows, ceiling)
            yield from (f"{line}\n" for line in failures(rows))


def failures(rows: list[Result]) -> Iterator[str]:
    """A line for each job that failed."""
    for row in rows:
        if "failed" in row:
            yield f"Failed ({', '.join(f'{key} {row[key]}' for key in row if key != 'failed')}): `{row['failed']}`"


def ceilings(rows: list[Result], ceiling: Result) -> Iterator[str]:
    """What the card reached by itself."""
    yield "### The card's ceilings\n"
    yield from table(
        ("", "reached"),
        (f"bfloat16 product, {ceiling.get('product_side')} squared", f"{ceiling.get('product', 0) / 1e12:.1f} TFLOP/s"),
        ("copy", f"{ceiling.get('copy', 0) / 1e9:.1f} GB/s"),
        *((f"attention, {name}", f"{each / 1e12:.1f} TFLOP/s") for name, each in ceiling.get("attention", {}).items()),
    )


def training(rows: list[Result], ceiling: Result) -> Iterator[str]:
    """A length of a method a row."""
    yield "### Training\n"
    head = ("method", "layers", "tokens", "tokens/s", "MFU", "with recomputation", "peak", "planned", "off by")
    yield from table(head, *(training_row(row, ceiling) for row in rows if "tokens" in row))


def training_row(row: Result, ceiling: Result) -> tuple[str, ...]:
    """MFU is what forward and backward need, over what the large product reached; recomputation is counted apart."""
    about = (row["method"], str(row["layers"]), f"{row['sequences']} x {row['tokens']:,}")
    planned = row["planned_bytes"]
    if row.get("out_of_memory"):
        return (*about, "out of memory", "", "", "", f"{planned / GIB:.1f} GiB", "")
    memory = ("not measured", f"{planned / GIB:.3g} GiB", "")
    if peak := row.get("peak_bytes"):
        memory = (f"{peak / GIB:.1f} GiB", f"{planned / GIB:.1f} GiB", f"{planned / peak - 1:+.0%}")
    return (*about, f"{row['tokens_per_second']:,.0f}", *utilizations(row, ceiling), *memory)


def utilizations(row: Result, ceiling: Result) -> tuple[str, str]:
    """Shares of the measured ceiling: of the model's own operations, and of all that were done."""
    if "product" not in ceiling:
        return "", ""
    flops, available = row["flops"], row["seconds_a_step"] * ceiling["product"]
    own = flops["forward"] + flops["backward"]
    return f"{own / available:.1%}", f"{(own + flops['recomputation']) / available:.1%}"


def neighbours(rows: list[Result], ceiling: Result) -> Iterator[str]:
    """A contender a row; the same shape, tokens, method and rank, an adapter alone."""
    yield "### The neighbours\n"
    lines = []
    for row in rows:
        if "tokens" in row and not row.get("out_of_memory"):
            beside = ratio(row, next((each for each in rows if is_ours(each, row["method"])), {}))
            speed = f"{row['tokens_per_second']:,.0f}"
            lines.append((row["contender"], row["method"], f"{row['tokens']:,}", speed, beside, peak_of(row)))
        elif "tokens" in row:
            lines.append((row["contender"], row["method"], f"{row['tokens']:,}", "out of memory", "", ""))
    yield from table(("", "method", "tokens", "tokens/s", "beside pi-lora", "peak"), *lines)


def levers(rows: list[Result], ceiling: Result) -> Iterator[str]:
    """A change of the recipe a row, beside no change."""
    yield "### What each key of the recipe does\n"
    before = next((row for row in rows if row.get("changes") == {}), {})
    lines = []
    for row in rows:
        if "tokens" not in row:
            continue
        changes = " ".join(
            f"`{section}.{key}: {value}`".replace("True", "true").replace("False", "false")
            for section, values in row["changes"].items()
            for key, value in values.items()
        )
        if row.get("out_of_memory"):
            lines.append((changes or "none", "out of memory", "", ""))
            continue
        speed = f"{row['tokens_per_second']:,.0f}"
        lines.append((changes or "none", speed, ratio(row, before), peak_of(row)))
    yield from table(("change", "tokens/s", "beside none", "peak"), *lines)


def longest(rows: list[Result], ceiling: Result) -> Iterator[str]:
    """The longest sequence under each cap that ran a whole step, and Unsloth's published one."""
    yield "### The longest sequence, QLoRA of rank 32\n"
    lines = []
    for cap in dict.fromkeys(row.get("cap") for row in rows):
        tried = [row for row in rows if row.get("cap") == cap and "tokens" in row]
        ran = max((row["tokens"] for row in tried if not row.get("out_of_memory")), default=0)
        failed = min((row["tokens"] for row in tried if row.get("out_of_memory")), default=None)
        published = UNSLOTH_LONGEST.get(round(cap)) if cap else None
        lines.append(
            (
                f"{cap:g} GB" if cap else "the whole card",
                f"{ran:,}" if ran else "none",
                f"{failed:,}" if failed else "not found",
                f"{published:,}" if published else "",
            )
        )
    yield from table(("memory", "ran", "too long", "Unsloth's published, 8B"), *lines)


def evaluation(rows: list[Result], ceiling: Result) -> Iterator[str]:
    """Perplexity by window, and the grid of passkeys."""
    found = next((row for row in rows if "perplexity" in row), None)
    if found is None:
        return
    yield "### Measuring\n"
    grid = found["passkey"]
    yield from table(
        ("", "pi-lora", "the neighbour's way"),
        *(
            (f"perplexity at {row['window']:,}, stride {found['stride']}", *speeds(row, "yarn"))
            for row in found["perplexity"]
        ),
        (
            f"{grid['depths']} x {grid['trials']} passkeys in {grid['target']:,} tokens",
            f"{grid['pi_lora']:.1f} s",
            f"{grid['longlora']:.1f} s (LongLoRA's, from {grid['longlora_trials_timed']} trials)",
        ),
    )


def speeds(row: Result, other: str) -> tuple[str, str]:
    """Tokens scored a second by both."""
    return f"{row['pi_lora']:,.0f} tokens/s", f"{row[other]:,.0f} tokens/s (YaRN's)"


def demo(rows: list[Result], ceiling: Result) -> Iterator[str]:
    """One sentence."""
    for row in rows:
        if "seconds" in row:
            yield f"`pi-lora train recipes/demo.yaml`, {row['steps']} steps: {row['seconds']:.1f} s, start to finish.\n"


def is_ours(row: Result, method: str) -> bool:
    """Whether it is pi-lora's row of a method."""
    return row["method"] == method and row.get("contender") == "pi-lora"


def ratio(row: Result, other: Result) -> str:
    """Tokens a second beside another row's, where both have them."""
    speeds = [each.get("tokens_per_second") for each in (row, other)]
    return f"{speeds[0] / speeds[1]:.2f}" if all(speeds) else ""


def peak_of(row: Result) -> str:
    """What the allocator had at most."""
    return f"{row['peak_bytes'] / GIB:.1f} GiB" if "peak_bytes" in row else "not measured"


def table(*rows: tuple[str, ...]) -> Iterator[str]:
    """Rows as Markdown, the first of them the head, and an empty line."""
    for index, row in enumerate(rows):
        yield "| " + " | ".join(row) + " |"
        if index == 0:
            yield "|" + "---|" * len(row)
    yield ""


PARTS = {
    "ceilings": ceilings,
    "training": training,
    "neighbours": neighbours,
    "levers": levers,
    "longest": longest,
    "evaluation": evaluation,
    "demo": demo,
}
