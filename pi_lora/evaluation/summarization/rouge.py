"""ROUGE (Lin 2004) as SCROLLS computes it: rouge-score's F1 with Porter stemming, the mean over all examples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rouge_score.rouge_scorer import RougeScorer

ROUGES = ("rouge1", "rouge2", "rougeL")
HOW = "rouge-score's F1 x 100 with Porter stemming, rougeL over the whole text, the mean over examples, as SCROLLS"
RESAMPLES = 1000
# Table 6 of the paper, GovReport at 16k, in percent: ROUGE-1, -2, -L.
PAPER = {
    "CoLT5 Base (paper, table 6)": (58.7, 29.6, 31.4),
    "CoLT5 XL (paper, table 6)": (61.3, 32.2, 33.8),
    "LLaMA-7B extended (paper, table 6)": (60.0, 28.0, 29.5),
}


@dataclass(frozen=True)
class Rouge:
    """A mean in percent and its 95 % interval, from `RESAMPLES` bootstrap samples of the examples."""

    mean: float
    low: float
    high: float


def rouge(predictions: Sequence[str], references: Sequence[str], seed: int = 0) -> dict[str, Rouge]:
    """ROUGE-1, -2 and -L of predictions against one reference each, in percent; `seed` is of the intervals.

    >>> rouge(["The cats sat."], ["the cat sat"])["rougeL"].mean
    100.0
    """
    scorer = RougeScorer(list(ROUGES), use_stemmer=True)
    scored = [scorer.score(reference, each) for reference, each in zip(references, predictions, strict=True)]
    rng = np.random.default_rng(seed)
    # The same samples for all three, so that they can be compared.
    samples = rng.integers(len(scored), size=(RESAMPLES, len(scored)))
    found = {}
    for name in ROUGES:
        values = np.array([100 * each[name].fmeasure for each in scored])
        low, high = np.percentile(values[samples].mean(axis=1), [2.5, 97.5])
        found[name] = Rouge(float(values.mean()), float(low), float(high))
    return found


def geometric_mean(scores: dict[str, Rouge]) -> float:
    """Of the three, the one number that SCROLLS ranks summaries by."""
    return math.prod(scores[name].mean for name in ROUGES) ** (1 / len(ROUGES))
