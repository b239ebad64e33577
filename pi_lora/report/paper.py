"""What the paper measured (tables 1, 2 and 4), to stand beside a run of the same model, window and method."""

from typing import NamedTuple

from pi_lora.recipe.schema import Recipe
from pi_lora.report.tables import markdown_table

WINDOWS = (2048, 4096, 8192, 16384, 32768)
SIZES = {"7b": "7B", "13b": "13B", "30b": "33B", "33b": "33B", "65b": "65B"}


class PaperRow(NamedTuple):
    """Perplexity at `WINDOWS` up to the target (tables 1 and 2), and k_max after 1,000 steps (table 4)."""

    pg19: tuple[float, ...]
    proof_pile: tuple[float, ...]
    k_max: int | None = None


# By size, target window and method.
PAPER: dict[tuple[str, int, str], PaperRow] = {
    ("7B", 8192, "direct"): PaperRow((7.21, 7.34, 7.69), (2.85, 2.74, 2.73), 2304),
    ("7B", 8192, "pi"): PaperRow((7.13, 6.96, 6.95), (2.79, 2.57, 2.39), 8192),
    ("7B", 16384, "pi"): PaperRow((7.11, 6.93, 6.82, 6.83), (2.79, 2.57, 2.37, 2.25), 16384),
    ("7B", 32768, "pi"): PaperRow((7.23, 7.04, 6.91, 6.80, 6.77), (2.82, 2.59, 2.39, 2.24, 2.48), 32768),
    ("13B", 8192, "direct"): PaperRow((6.56, 6.57, 6.69), (2.71, 2.56, 2.50)),
    ("13B", 8192, "pi"): PaperRow((6.55, 6.42, 6.42), (2.67, 2.47, 2.30)),
    ("13B", 16384, "pi"): PaperRow((6.56, 6.42, 6.31, 6.32), (2.68, 2.47, 2.29, 2.18)),
    ("13B", 32768, "pi"): PaperRow((6.54, 6.40, 6.28, 6.18, 6.09), (2.68, 2.46, 2.28, 2.15, 2.35)),
    ("33B", 8192, "direct"): PaperRow((5.88, 5.99, 6.21), (2.56, 2.48, 2.47), 2304),
    ("33B", 8192, "pi"): PaperRow((5.82, 5.69, 5.71), (2.50, 2.32, 2.18), 8192),
    ("33B", 16384, "pi"): PaperRow((5.87, 5.74, 5.67, 5.68), (2.53, 2.34, 2.18, 2.07), 16384),
    ("65B", 8192, "pi"): PaperRow((5.42, 5.32, 5.37), (2.43, 2.26, 2.12)),
}


def paper_section(recipe: Recipe) -> str:
    """Return what the paper measured of the same LLaMA, known by its name, window and method; empty if nothing."""
    name = recipe.model.name.rpartition("/")[2].lower()
    size = SIZES.get(name.removeprefix("llama-"), "") if name.startswith("llama-") else ""
    target = recipe.context.target
    if not (found := PAPER.get((size, target, recipe.scaling))):
        return ""
    tables = {"PG-19 (table 1)": found.pg19, "proof-pile (table 2)": found.proof_pile}
    rows = markdown_table(
        ["paper", *(f"{window:,} tokens" for window in WINDOWS if window <= target)],
        [[name, *(f"{each:.2f}" for each in values)] for name, values in tables.items()],
    )
    k_max = f"\nk_max {found.k_max:,} of {target:,} after 1,000 steps (table 4)." if found.k_max else ""
    return f"LLaMA-{size} to {target:,} tokens, full tuning. Only results on the same data compare.\n\n{rows}{k_max}"
