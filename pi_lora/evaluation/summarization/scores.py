"""Scores of summarization."""

from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.metrics import Interval
from pi_lora.recipe.evaluation import SummarizationOptions
from pi_lora.types import Json

ROUGES = ("rouge1", "rouge2", "rougeL")


class SummarizationScores(Scores):
    """ROUGE F1 in percent over `examples` with 95 % intervals, and the number of documents that were cut."""

    measurement = "summarization"

    options: SummarizationOptions | None = None
    task: Json | None = None
    examples: int = 0
    left_out: Json | None = None
    documents_cut: int = 0
    rouge1: float
    rouge2: float
    rougeL: float
    intervals: dict[str, Interval] | None = None
