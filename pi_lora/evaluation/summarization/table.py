"""ROUGE scores as a table, beside the paper's table 6."""

from rich.table import Table

from pi_lora.evaluation.summarization.rouge import PAPER, ROUGES
from pi_lora.types import Json

TITLES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def summarization_table(scores: Json, beside_the_paper: bool) -> Table:
    """A model's ROUGE with 95 % intervals; the paper's rows are of GovReport alone."""
    sampling = scores["sampling"]
    table = Table(title=f"ROUGE over {scores['examples']:,} examples")
    table.add_column("model")
    table.add_column("window", justify="right")
    for name in ROUGES:
        table.add_column(TITLES[name], justify="right")
    table.add_row(scores["model"], f"{scores['window']:,}", *(_with_interval(scores, name) for name in ROUGES))
    for model, numbers in PAPER.items() if beside_the_paper else ():
        table.add_row(model, "16K", *(f"{number:.1f}" for number in numbers))
    table.caption = (
        f"temperature {sampling['temperature']:g}, top-p {sampling['top_p']:g}, at most "
        f"{sampling['max_new_tokens']:,} tokens, seed {sampling['seed']}; {scores['metric']}; intervals of 95 %"
    )
    return table


def _with_interval(scores: Json, name: str) -> str:
    low, high = scores["intervals"][name]
    return f"{scores[name]:.1f} ({low:.1f} to {high:.1f})"
