"""Scores of RULER."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from pydantic import Field

from pi_lora.evaluation.measurement import Result, Scores
from pi_lora.evaluation.metrics import longest_passing
from pi_lora.recipe.evaluation import RulerOptions

ALL_TASKS = 13
# Llama-2-7B at 4,096 tokens, over all 13 tasks (Hsieh et al. 2024, section 4).
PAPERS_THRESHOLD = 0.856


class RulerTask(Result):
    """A task of RULER at one window: the mean of `outcomes`, the share of answers found in each of the prompts made for
    `length` tokens; `tokens` is the longest with what is written after it.
    """

    score: float = Field(ge=0, le=1)
    stderr: float | None = None
    samples: int
    length: int
    tokens: int
    outcomes: list[float] | None = None


class RulerWindow(Result):
    """The mean over the tasks of RULER at one window (tokens)."""

    window: int
    score: float = Field(ge=0, le=1)
    stderr: float | None = None
    tasks: dict[str, RulerTask]


class RulerScores(Scores):
    """RULER at several windows, and its effective length in tokens: up to it every mean reaches the paper's 85.6 %."""

    measurement = "ruler"

    options: RulerOptions | None = None
    lm_eval: str | None = None
    lengths: list[RulerWindow] = Field(min_length=1)
    effective_length: int


def mean_of(window: int, tasks: Mapping[str, RulerTask]) -> RulerWindow:
    """Return the mean of tasks at `window` tokens, each of the same weight."""
    errors = [task.stderr for task in tasks.values() if task.stderr is not None]
    error = math.hypot(*errors) / len(tasks) if len(errors) == len(tasks) else None
    score = fmean(task.score for task in tasks.values())
    return RulerWindow(window=window, score=score, stderr=error, tasks=dict(tasks))


def effective_length(lengths: Sequence[RulerWindow]) -> int:
    """Return the longest window such that it and all shorter ones reach the threshold; 0 if the shortest does not."""
    return longest_passing({each.window: each.score for each in lengths}, PAPERS_THRESHOLD)
