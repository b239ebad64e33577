"""ROUGE (Lin 2004) as SCROLLS computes it, the mean over all examples."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rouge_score.rouge_scorer import RougeScorer

from pi_lora.evaluation.summarization.scores import ROUGES

HOW = "rouge-score's F1 x 100 with Porter stemming, rougeL over the whole text, the mean over examples, as SCROLLS"
RESAMPLES = 1000


class Rouge(NamedTuple):
    """A mean in percent and its 95 % interval, from `RESAMPLES` bootstrap samples of the examples."""

    mean: float
    low: float
    high: float


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, Rouge]:
    """Return ROUGE-1, -2 and -L of predictions against one reference each, in percent.

    >>> rouge(["The cats sat."], ["the cat sat"])["rougeL"].mean
    100.0
    """
    scorer = RougeScorer(list(ROUGES), use_stemmer=True)
    scored = [scorer.score(reference, each) for reference, each in zip(references, predictions, strict=True)]
    # The same samples for all three, so that they can be compared.
    samples = np.random.default_rng(0).integers(len(scored), size=(RESAMPLES, len(scored)))
    found = {}
    for name in ROUGES:
        values = np.array([100 * each[name].fmeasure for each in scored])
        low, high = np.percentile(values[samples].mean(axis=1), [2.5, 97.5])
        found[name] = Rouge(float(values.mean()), float(low), float(high))
    return found
