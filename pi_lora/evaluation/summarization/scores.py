"""Summarization scores."""

from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.metrics import Interval
from pi_lora.recipe.evaluation import SummarizationOptions
from pi_lora.types import Json

ROUGES = ("rouge1", "rouge2", "rougeL")


class SummarizationScores(Scores):
    """ROUGE F1 in percent over `examples` with 95 % intervals, and how the summaries were prompted and sampled."""

    measurement = "summarization"

    options: SummarizationOptions | None = None
    engine: str | None = None
    data: Json | str = ""
    task: Json | None = None
    metric: str = ""
    examples: int = 0
    left_out: Json | None = None
    documents_cut: int | None = None
    ended: int | None = None
    seeds: list[int] | None = None
    predictions: str | None = None
    rouge1: float
    rouge2: float
    rougeL: float
    geometric_mean: float | None = None
    intervals: dict[str, Interval] | None = None
