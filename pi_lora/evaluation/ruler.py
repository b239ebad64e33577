"""RULER (Hsieh et al. 2024, arXiv 2404.06654) through lm-eval: how much of the window a model uses. Needles, chains of
variables, frequent words and questions in windows of several lengths are answered with a KV cache.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated

from pydantic import Field

from pi_lora.data.chats import template_tokens
from pi_lora.evaluation.duration import budget_here, clock_of
from pi_lora.evaluation.forward import prompts_at_once
from pi_lora.evaluation.measurement import (
    About,
    Measurement,
    Metric,
    Preview,
    Result,
    Scores,
    Session,
    Value,
    header_of,
    longest_passing,
    proportion,
)
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.source import ModelSource
from pi_lora.recipe.budget import MAX_SAMPLES, affordable
from pi_lora.recipe.evaluation import RulerOptions, default_windows
from pi_lora.storage import digest_of

ALL_TASKS = 13
# Llama-2-7B at 4,096 tokens, over all 13 tasks (Hsieh et al. 2024, section 4).
PAPERS_THRESHOLD = 0.856


class RulerTask(Result):
    """A task of RULER at one window. The score is the mean of `outcomes`, the share of answers retrieved from each
    prompt. Prompts are made for `length` tokens; the longest one and the text generated after it have `tokens`.
    `prompts` is a digest of all.
    """

    score: Annotated[float, Field(ge=0, le=1)]
    samples: int
    length: int
    tokens: int
    outcomes: list[float]
    prompts: str = ""


class RulerWindow(Result):
    """The unweighted mean over the tasks of RULER at one window (tokens)."""

    window: int
    score: Annotated[float, Field(ge=0, le=1)]
    tasks: dict[str, RulerTask]


class RulerScores(Scores):
    """RULER at several windows, and the effective length in tokens: up to it every mean reaches the paper's 85.6 %. It
    is 0 if the shortest window fails.
    """

    measurement = "ruler"

    options: RulerOptions
    lm_eval: str | None = None
    lengths: Annotated[list[RulerWindow], Field(min_length=1)]
    effective_length: int


class Ruler(Measurement[RulerOptions, RulerScores]):
    """RULER (Hsieh et al. 2024) through lm-eval."""

    options = RulerOptions
    scores = RulerScores

    def prepare(self, options: RulerOptions, models: Sequence[ModelSource]) -> RulerOptions:
        """Fill in the windows, by default L', L'/2, ... down to L, with L, the tasks, and the samples."""
        from pi_lora.evaluation.harness import RULER_TASKS

        originals = [model.original for model in models]
        longest = max(model.window for model in models)
        windows = options.windows or default_windows(longest, min(originals), originals)
        # Each task has the budget of a measurement.
        samples = options.samples or affordable(budget_here(), sum(windows), MAX_SAMPLES)
        return options.changed(windows=windows, tasks=options.tasks or RULER_TASKS, samples=samples)

    def problems(self, options: RulerOptions, preview: Preview) -> Iterator[str]:
        """Yield tasks that do not exist, or whose prompts the shortest window does not hold, where lm-eval is here."""
        if find_spec("lm_eval") is None:
            return
        from pi_lora.evaluation.harness import RULER_TASKS, ruler_problems

        windows = options.windows or default_windows(preview.window, preview.original or preview.window)
        template = template_tokens(preview.tokenizer) if preview.tokenizer and options.chat else 0
        for problem in ruler_problems(options.tasks or RULER_TASKS, min(windows) - template):
            yield f"{preview.key('tasks')}: {problem}"

    def check(self, options: RulerOptions) -> None:
        """Read the texts of the tasks."""
        from pi_lora.evaluation.harness import check_texts

        check_texts(options.tasks or ())

    def measure(self, model: LoadedModel, options: RulerOptions, session: Session) -> RulerScores:
        """Measure the tasks, the shortest window first. Raise DataError if a window does not hold a prompt of a task,
        and Interrupted on Ctrl-C.
        """
        from pi_lora.evaluation.harness import VERSION, save_tokenizer

        prompts = len(options.tasks or ()) * (options.samples or 1)
        clock = clock_of(model)
        amount = f"{prompts} prompts at each of {len(options.windows or ())} windows"
        about = About("ruler", amount, ("samples", (options.samples or 1) // 4))
        session.announce(clock, about, prompts * clock.work((0, window) for window in options.windows or ()))
        with TemporaryDirectory() as tokenizer_folder:
            save_tokenizer(model.tokenizer, tokenizer_folder)
            lengths = [
                self._measure_window(model, window, options, session, tokenizer_folder=tokenizer_folder)
                for window in sorted(options.windows or ())
            ]
        score_by_window = {length.window: length.score for length in lengths}
        return RulerScores(
            **header_of(model),
            options=options,
            lm_eval=VERSION,
            lengths=lengths,
            effective_length=longest_passing(score_by_window, PAPERS_THRESHOLD),
        )

    def _measure_window(
        self, model: LoadedModel, window: int, options: RulerOptions, session: Session, *, tokenizer_folder: str
    ) -> RulerWindow:
        """Measure the tasks at one window, with the tokenizer in a folder."""
        from pi_lora.evaluation.harness import RankedLM, ruler_task

        batch_size = prompts_at_once(model, window, options.batch_size)
        lm = RankedLM(model, window=window, batch_size=batch_size, options=options, session=session)
        tasks = {}
        for name in options.tasks or ():
            task, tokens = ruler_task(name, options, lm, tokenizer_folder=tokenizer_folder)
            samples = lm.evaluate(name, task, options.samples)["samples"]
            outcomes = [float(sample[str(lm.length)]) for sample in samples]
            tasks[name] = RulerTask(
                score=fmean(outcomes),
                samples=len(outcomes),
                length=lm.length,
                tokens=tokens,
                outcomes=outcomes,
                prompts=digest_of([sample["prompt_hash"] for sample in samples]),
            )
        mean = fmean(task.score for task in tasks.values())
        return RulerWindow(window=window, score=mean, tasks=tasks)

    def metrics(self, scores: RulerScores) -> Iterator[Metric]:
        """Yield the mean of the tasks and each task by window, and the effective length."""
        details = []
        for length in scores.lengths:
            values: list[Value] = []
            for name, task in length.tasks.items():
                prompts = f"{name} {task.prompts or scores.options.seed} of {task.length} tokens"
                values += [Value(f"{prompts}: {i}", outcome, group=name) for i, outcome in enumerate(task.outcomes)]
                details.append(proportion(name, task.score, task.samples, at=length.window))
            yield proportion(
                label="RULER",
                mean=length.score,
                samples=len(values),
                at=length.window,
                values=values,
                dataset=f"RULER, {len(length.tasks)} tasks at {length.window} tokens",
                hub_name="score",
            )
        yield from details
        yield Metric(
            label=f"effective length ({PAPERS_THRESHOLD:.1%}, {len(scores.lengths[0].tasks)} of {ALL_TASKS} tasks)",
            value=scores.effective_length,
            unit="tokens",
            dataset="RULER",
            hub_name="effective length",
        )
