"""What the paper measured, to stand beside a run of the same model, window and method."""

import csv
from pathlib import Path

from pi_lora.recipe.schema import Recipe
from pi_lora.report.tables import markdown_table

# Perplexity at WINDOWS up to the target (tables 1 and 2), and k_max after 1,000 steps (table 4).
PAPER = Path(__file__).with_name("paper.csv")
WINDOWS = (2048, 4096, 8192, 16384, 32768)


def paper_section(recipe: Recipe) -> str:
    """Return what the paper measured of the same LLaMA, known by its name, window and method; empty if nothing."""
    name, target = recipe.model.name.rpartition("/")[2].lower(), recipe.context.target
    size = name.removeprefix("llama-").replace("30b", "33b").upper()
    with PAPER.open(encoding="utf-8", newline="") as file:
        rows = {(row["model"], row["target"], row["method"]): row for row in csv.DictReader(file)}
    row = rows.get((size, str(target), recipe.scaling))
    if row is None or not name.startswith("llama-"):
        return ""
    table = markdown_table(
        ["paper", *(f"{window:,} tokens" for window in WINDOWS if window <= target)],
        [["PG-19 (table 1)", *row["pg19"].split()], ["proof-pile (table 2)", *row["proof_pile"].split()]],
    )
    k_max = f"\nk_max {int(row['k_max']):,} of {target:,} after 1,000 steps (table 4)." if row["k_max"] else ""
    return f"LLaMA-{size} to {target:,} tokens, full tuning. Only results on the same data compare.\n\n{table}{k_max}"
