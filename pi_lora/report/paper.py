"""What the paper measured of the same model, window and method as a run."""

import csv
from pathlib import Path

from pi_lora.recipe.schema import Recipe
from pi_lora.report.tables import markdown_table

# By model, target and method: perplexity at windows up to the target (tables 1 and 2), and k_max (table 4).
PAPER = Path(__file__).with_name("paper.csv")


def paper_table(recipe: Recipe) -> str:
    """Return what the paper measured of the LLaMA that a recipe extends, as Markdown; empty if nothing."""
    of_recipe = [recipe.model.name.rpartition("/")[2].lower(), str(recipe.context.target), recipe.scaling]
    with PAPER.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    results = [row[3:] for row in rows if row[:3] == of_recipe]
    return markdown_table(head[3:], results) if results else ""
