"""ROUGE (Lin 2004) as SCROLLS computes it, the mean over all examples, and as a table beside the paper's table 6."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.table import Table
from rouge_score.rouge_scorer import RougeScorer

from pi_lora.data.sources import SCROLLS
from pi_lora.evaluation.results import SummarizationScores

ROUGES = ("rouge1", "rouge2", "rougeL")
HOW = "rouge-score's F1 x 100 with Porter stemming, rougeL over the whole text, the mean over examples, as SCROLLS"
RESAMPLES = 1000
# GovReport at 16k, in percent: ROUGE-1, -2, -L.
PAPER = {
    "CoLT5 Base (paper, table 6)": ("58.7", "29.6", "31.4"),
    "CoLT5 XL (paper, table 6)": ("61.3", "32.2", "33.8"),
    "LLaMA-7B extended (paper, table 6)": ("60.0", "28.0", "29.5"),
}


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
