"""Perplexity as a measurement: its scores, their metrics and their picture."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from pi_lora.drawing import STYLES, round_levels
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.measurement import Measurement
from pi_lora.evaluation.metrics import Metric, Value
from pi_lora.evaluation.perplexity.scores import (
    PerplexityScores,
    WindowPerplexity,
)
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import PerplexityOptions


class Perplexity(Measurement[PerplexityOptions, PerplexityScores]):
    """Sliding-window perplexity (paper, section 3.2)."""

    name = "perplexity"
    options = PerplexityOptions
    scores = PerplexityScores

    def prepare(self, options: PerplexityOptions, models: Sequence[Model]) -> PerplexityOptions:
        """Fill in windows and stride, by default those of the longest window."""
        windows, stride = options.sweep(max(model.window for model in models))
        return options.changed(windows=windows, stride=stride)

    def run(self, model: Model, options: PerplexityOptions, session: Session) -> PerplexityScores:
        """Measure a model."""
        from pi_lora.evaluation.perplexity.measure import evaluate_perplexity

        return evaluate_perplexity(model, options, session)

    def metrics(self, scores: PerplexityScores) -> list[Metric]:
        """Return perplexity and bits per byte by window, and the loss by position where it was measured."""
        metrics = [_perplexity(scores, row) for row in scores.windows]
        metrics += [
            Metric("bits per byte", row.bits_per_byte, higher_is_better=False, at=row.window, digits=4)
            for row in scores.windows
            if row.bits_per_byte is not None
        ]
        for row in scores.by_position.bins if scores.by_position else ():
            label = f"loss of tokens {row.first:,} to {row.last - 1:,} in a window"
            metrics.append(Metric(label, row.loss, "nats", False, digits=3, samples=row.tokens))
        return metrics

    def about(self, scores: Sequence[PerplexityScores]) -> str:
        """Return the documents, the stride and the weighting."""
        first = scores[0]
        about = f"{first.documents} documents of {first.data}, stride {first.stride}, every token weighted equally"
        # Cut to as many tokens, a text has as many in every tokenizer, but not of the same bytes.
        if len({tuple((row.tokens, row.bytes) for row in each.windows) for each in scores}) > 1:
            about += "; the tokenizers differ: perplexities by token do not compare, bits per byte do"
        return about

    def draw(self, axes: Any, scores: Mapping[str, PerplexityScores]) -> None:
        """Draw the loss by position where all have it, and else perplexity by window."""
        curves = {label: each.by_position for label, each in scores.items() if each.by_position}
        by_position = len(curves) == len(scores)
        for (label, each), (colour, marker) in zip(scores.items(), cycle(STYLES), strict=False):
            if by_position:
                bins = curves[label].bins
                bounds = [bins[0].first, *(part.last for part in bins)]
                axes.stairs([part.loss for part in bins], bounds, baseline=None, color=colour, label=label)
            else:
                points = [(row.window, row.perplexity) for row in each.windows]
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, label=label)
        if by_position:
            axes.set(xlabel="tokens before, in the window", ylabel="loss (nats a token)")
            return
        axes.set(xscale="log", yscale="log", xlabel="window (tokens)", ylabel="perplexity (lower is better)")
        ticks = sorted({row.window for each in scores.values() for row in each.windows})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        levels = round_levels(*axes.get_ylim())
        axes.set_yticks(levels, [f"{level:g}" for level in levels])
        axes.minorticks_off()


def _perplexity(scores: PerplexityScores, row: WindowPerplexity) -> Metric:
    documents = [
        Value(f"{document.name} of {document.tokens} tokens", part.perplexity, part.tokens)
        for document in scores.per_document or ()
        for part in document.windows
        if part.window == row.window
    ]
    return Metric(
        "perplexity",
        row.perplexity,
        higher_is_better=False,
        at=row.window,
        digits=3,
        samples=row.tokens,
        values=documents,
        is_ratio=True,
        dataset=scores.data,
        hub_name="perplexity",
    )
