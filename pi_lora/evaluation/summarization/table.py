"""ROUGE scores as a table, beside the paper's table 6."""

from rich.table import Table

from pi_lora.data.tables import SCROLLS
from pi_lora.evaluation.results import SummarizationScores
from pi_lora.evaluation.summarization.rouge import PAPER, ROUGES


def summarization_table(scores: SummarizationScores) -> Table:
    """Return a model's ROUGE with 95 % intervals; of GovReport beside the paper's rows."""
    table = Table(title=f"ROUGE over {scores.examples:,} examples")
    table.add_column("model")
    for title in ("window", "ROUGE-1", "ROUGE-2", "ROUGE-L"):
        table.add_column(title, justify="right")
    cells = [f"{getattr(scores, name):.1f}" for name in ROUGES]
    if scores.intervals:
        bounds = [scores.intervals[name] for name in ROUGES]
        cells = [f"{cell} ({low:.1f} to {high:.1f})" for cell, (low, high) in zip(cells, bounds, strict=True)]
    table.add_row(scores.model, f"{scores.window:,}", *cells)
    if isinstance(scores.data, dict) and scores.data["name"] == SCROLLS:
        for model, numbers in PAPER.items():
            table.add_row(model, "16K", *(f"{number:.1f}" for number in numbers))
    table.caption = (
        "temperature {temperature:g}, top-p {top_p:g}, at most {max_new_tokens:,} tokens, seed {seed}; ".format(
            **scores.sampling
        )
        + f"{scores.metric}; intervals of 95 %"
    )
    return table
