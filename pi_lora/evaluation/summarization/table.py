"""ROUGE scores as a table, beside the paper's table 6."""

from rich.table import Table

from pi_lora.data.tables import SCROLLS
from pi_lora.evaluation.results import SummarizationScores
from pi_lora.evaluation.summarization.rouge import ROUGES

# GovReport at 16k, in percent: ROUGE-1, -2, -L.
PAPER = {
    "CoLT5 Base (paper, table 6)": ("58.7", "29.6", "31.4"),
    "CoLT5 XL (paper, table 6)": ("61.3", "32.2", "33.8"),
    "LLaMA-7B extended (paper, table 6)": ("60.0", "28.0", "29.5"),
}


def summarization_table(scores: SummarizationScores) -> Table:
    """Return a model's ROUGE with 95 % intervals; of GovReport beside the paper's rows."""
    how = "temperature {temperature:g}, top-p {top_p:g}, at most {max_new_tokens:,} tokens, seed {seed}"
    caption = f"{how.format(**scores.sampling)}; {scores.metric}; intervals of 95 %"
    table = Table("model", title=f"ROUGE over {scores.examples:,} examples", caption=caption)
    for title in ("window", "ROUGE-1", "ROUGE-2", "ROUGE-L"):
        table.add_column(title, justify="right")
    bounds = {name: " ({:.1f} to {:.1f})".format(*pair) for name, pair in (scores.intervals or {}).items()}
    cells = [f"{getattr(scores, name):.1f}{bounds.get(name, '')}" for name in ROUGES]
    table.add_row(scores.model, f"{scores.window:,}", *cells)
    if isinstance(scores.data, dict) and scores.data["name"] == SCROLLS:
        for model, numbers in PAPER.items():
            table.add_row(model, "16K", *numbers)
    return table
