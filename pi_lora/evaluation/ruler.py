"""RULER (Hsieh et al. 2024, arXiv 2404.06654) through lm-eval, how much of its window a model uses: needles, chains of
variables, frequent words and questions in windows of several lengths. Text is generated with a KV cache.
"""

from collections.abc import Sequence
from statistics import fmean
from tempfile import TemporaryDirectory

from pydantic import Field

from pi_lora.errors import DataError
from pi_lora.evaluation.forward import prompts_at_once
from pi_lora.evaluation.measurement import (
    Measurement,
    Metric,
    Result,
    Scores,
    Session,
    Value,
    longest_passing,
    proportion,
)
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import RulerOptions, default_windows
from pi_lora.types import Json

ALL_TASKS = 13
# Llama-2-7B at 4,096 tokens, over all 13 tasks (Hsieh et al. 2024, section 4).
PAPERS_THRESHOLD = 0.856


class RulerTask(Result):
    """A task of RULER at one window: the mean of `outcomes`, the share of answers found in each of the prompts made for
    `length` tokens; `tokens` is the longest with what is written after it.
    """

    score: float = Field(ge=0, le=1)
    samples: int
    length: int
    tokens: int
    outcomes: list[float]


class RulerWindow(Result):
    """The mean over the tasks of RULER at one window (tokens), each of the same weight."""

    window: int
    score: float = Field(ge=0, le=1)
    tasks: dict[str, RulerTask]


class RulerScores(Scores):
    """RULER at several windows, and its effective length in tokens: up to it every mean reaches the paper's 85.6 %; 0
    if that of the shortest window does not.
    """

    measurement = "ruler"

    options: RulerOptions
    lm_eval: str | None = None
    lengths: list[RulerWindow] = Field(min_length=1)
    effective_length: int


class Ruler(Measurement[RulerOptions, RulerScores]):
    """RULER (Hsieh et al. 2024) through lm-eval."""

    scores = RulerScores

    def prepare(self, options: RulerOptions, models: Sequence[Model]) -> RulerOptions:
        """Fill in the windows, by default L', L'/2, ... down to L, and the tasks."""
        from pi_lora.evaluation.harness import RULER_TASKS

        if unknown := ", ".join(set(options.tasks or ()).difference(RULER_TASKS)):
            raise DataError(f"--tasks: {unknown}: no such task of RULER; choose from {', '.join(RULER_TASKS)}")
        original = min(model.original for model in models)
        windows = options.windows or default_windows(max(model.window for model in models), original)
        return options.changed(windows=windows, tasks=options.tasks or RULER_TASKS)

    def measure(self, model: Model, options: RulerOptions, session: Session) -> Json:
        """Measure the tasks, the shortest window first. Raise DataError if a window does not hold a prompt of a task,
        and Interrupted on Ctrl-C.
        """
        from pi_lora.evaluation.harness import ROOM, VERSION, RankedLM, ruler_task, save_tokenizer

        lengths = []
        with TemporaryDirectory() as tokenizer:
            save_tokenizer(model.tokenizer, tokenizer)
            for window in sorted(options.windows or ()):
                at_once, length = options.batch_size or prompts_at_once(window), window - ROOM
                lm = RankedLM(model, window, at_once, options, session)
                tasks = {}
                for name in options.tasks or ():
                    task, tokens = ruler_task(name, options, lm, tokenizer)
                    samples = lm.evaluate(name, task, options.samples)["samples"]
                    outcomes = [float(sample[str(length)]) for sample in samples]
                    tasks[name] = RulerTask(
                        score=fmean(outcomes), samples=len(outcomes), length=length, tokens=tokens, outcomes=outcomes
                    )
                lengths.append(
                    RulerWindow(window=window, score=fmean(task.score for task in tasks.values()), tasks=tasks)
                )
        reached = longest_passing({each.window: each.score for each in lengths}, PAPERS_THRESHOLD)
        return {"lm_eval": VERSION, "lengths": lengths, "effective_length": reached}

    def metrics(self, scores: RulerScores) -> list[Metric]:
        """Return the mean of the tasks and each task by window, and the effective length."""
        means, details = [], []
        for length in scores.lengths:
            values = []
            for name, task in length.tasks.items():
                prompts = f"{name} {scores.options.seed} of {task.length} tokens"
                values += [Value(f"{prompts}: {i}", value, group=name) for i, value in enumerate(task.outcomes)]
                details.append(proportion(name, task.score, task.samples, at=length.window))
            samples = sum(task.samples for task in length.tasks.values())
            data = f"RULER, {len(length.tasks)} tasks at {length.window} tokens"
            hub: Json = {"at": length.window, "dataset": data, "hub_name": "score"}
            means.append(proportion("RULER", length.score, samples, values=values, **hub))
        label = f"effective length ({PAPERS_THRESHOLD:.1%}, {len(scores.lengths[0].tasks)} of {ALL_TASKS} tasks)"
        reached = Metric(label, scores.effective_length, "tokens", dataset="RULER", hub_name="effective length")
        return [*means, *details, reached]
