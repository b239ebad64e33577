"""Summarization as a measurement: scores and metrics."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pi_lora.errors import DataError
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.measurement import Measurement
from pi_lora.evaluation.metrics import Metric
from pi_lora.evaluation.summarization.scores import ROUGES, SummarizationScores
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import SummarizationOptions
from pi_lora.writing import check_can_write


class Summarization(Measurement[SummarizationOptions, SummarizationScores]):
    """Summaries of long documents, scored by ROUGE (paper, section 3.5)."""

    name = "summarization"
    options = SummarizationOptions
    scores = SummarizationScores

    def prepare(self, options: SummarizationOptions, models: Sequence[Model]) -> SummarizationOptions:
        """Fill in the rows, by default what the first model was tuned on, or GovReport."""
        from pi_lora.evaluation.summarization.measure import complete, evaluation_data

        if options.predictions:
            check_can_write(Path(options.predictions))
            if len(models) > 1:
                raise DataError(f"--predictions: {options.predictions}: is for one model; name one, or leave it out")
        return complete(options, evaluation_data(models[0].name, options))

    def run(self, model: Model, options: SummarizationOptions, session: Session) -> SummarizationScores:
        """Measure a model."""
        from pi_lora.evaluation.summarization.measure import evaluate_summarization

        return evaluate_summarization(model, options, session)

    def metrics(self, scores: SummarizationScores) -> list[Metric]:
        """Return ROUGE-1, -2 and -L."""
        return [
            Metric(
                f"ROUGE-{name.removeprefix('rouge')}",
                getattr(scores, name),
                digits=2,
                samples=scores.examples,
                interval=(scores.intervals or {}).get(name),
                dataset=(scores.options and scores.options.data) or "",
                hub_name=name,
            )
            for name in ROUGES
        ]

    def about(self, scores: Sequence[SummarizationScores]) -> str:
        """Return how the summaries were sampled and scored."""
        first, options = scores[0], scores[0].options or SummarizationOptions()
        cut = "/".join(f"{each.documents_cut:,}" for each in scores)
        sampling = f"temperature {options.temperature:g}, top-p {options.top_p:g}, seed {options.seed}"
        return f"{first.examples:,} examples, {cut} documents cut; {sampling}; rouge-score's F1 x 100 with stemming"

    def draw(self, axes: Any, scores: Mapping[str, SummarizationScores]) -> None:
        """Draw nothing: there is no curve."""
