"""The rows of the paper's tables 1, 2 and 4 that a run of the same size, window and method can be compared with."""

from pi_lora.recipe.schema import Recipe
from pi_lora.report.tables import markdown_table

WINDOWS = (2048, 4096, 8192, 16384, 32768)
SIZES = {"7b": "7B", "13b": "13B", "30b": "33B", "33b": "33B", "65b": "65B"}

Row = tuple[str, int, str]  # size, target window, method

# Table 1: PG-19; perplexity at the windows above, as far as the target reaches.
PG19: dict[Row, tuple[float, ...]] = {
    ("7B", 8192, "direct"): (7.21, 7.34, 7.69),
    ("7B", 8192, "pi"): (7.13, 6.96, 6.95),
    ("7B", 16384, "pi"): (7.11, 6.93, 6.82, 6.83),
    ("7B", 32768, "pi"): (7.23, 7.04, 6.91, 6.80, 6.77),
    ("13B", 8192, "direct"): (6.56, 6.57, 6.69),
    ("13B", 8192, "pi"): (6.55, 6.42, 6.42),
    ("13B", 16384, "pi"): (6.56, 6.42, 6.31, 6.32),
    ("13B", 32768, "pi"): (6.54, 6.40, 6.28, 6.18, 6.09),
    ("33B", 8192, "direct"): (5.88, 5.99, 6.21),
    ("33B", 8192, "pi"): (5.82, 5.69, 5.71),
    ("33B", 16384, "pi"): (5.87, 5.74, 5.67, 5.68),
    ("65B", 8192, "pi"): (5.42, 5.32, 5.37),
}
# Table 2: proof-pile.
PROOF_PILE: dict[Row, tuple[float, ...]] = {
    ("7B", 8192, "direct"): (2.85, 2.74, 2.73),
    ("7B", 8192, "pi"): (2.79, 2.57, 2.39),
    ("7B", 16384, "pi"): (2.79, 2.57, 2.37, 2.25),
    ("7B", 32768, "pi"): (2.82, 2.59, 2.39, 2.24, 2.48),
    ("13B", 8192, "direct"): (2.71, 2.56, 2.50),
    ("13B", 8192, "pi"): (2.67, 2.47, 2.30),
    ("13B", 16384, "pi"): (2.68, 2.47, 2.29, 2.18),
    ("13B", 32768, "pi"): (2.68, 2.46, 2.28, 2.15, 2.35),
    ("33B", 8192, "direct"): (2.56, 2.48, 2.47),
    ("33B", 8192, "pi"): (2.50, 2.32, 2.18),
    ("33B", 16384, "pi"): (2.53, 2.34, 2.18, 2.07),
    ("65B", 8192, "pi"): (2.43, 2.26, 2.12),
}
# Table 4: k_max after 1,000 steps; direct tuning reaches 2,560 after 10,000.
K_MAX: dict[Row, int] = {
    ("7B", 8192, "direct"): 2304,
    ("33B", 8192, "direct"): 2304,
    ("7B", 8192, "pi"): 8192,
    ("7B", 16384, "pi"): 16384,
    ("7B", 32768, "pi"): 32768,
    ("33B", 8192, "pi"): 8192,
    ("33B", 16384, "pi"): 16384,
}


def row_of(recipe: Recipe) -> Row | None:
    """Return the paper's row for a recipe: a LLaMA of the first generation, known by its name."""
    name = recipe.model.name.rpartition("/")[2].lower()
    size = SIZES.get(name.removeprefix("llama-")) if name.startswith("llama-") else None
    row = (size or "", recipe.context.target, recipe.scaling)
    return row if row in PG19 else None


def paper_section(recipe: Recipe) -> str:
    """Return what the paper measured of the same model, window and method; empty if it has no such row."""
    row = row_of(recipe)
    if row is None:
        return ""
    tables = (("PG-19 (table 1)", PG19), ("proof-pile (table 2)", PROOF_PILE))
    rows = markdown_table(
        ["paper", *(f"{window:,} tokens" for window in WINDOWS[: len(PG19[row])])],
        [[name, *(f"{each:.2f}" for each in table[row])] for name, table in tables],
    )
    k_max = f"\nk_max {K_MAX[row]:,} of {row[1]:,} after 1,000 steps (table 4)." if row in K_MAX else ""
    return f"LLaMA-{row[0]} to {row[1]:,} tokens, full tuning. Only results on the same data compare.\n\n{rows}{k_max}"
