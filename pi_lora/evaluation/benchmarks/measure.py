"""Short-context benchmarks at a model's original window, with lm-eval's prompts, truncation and metrics."""

from pathlib import Path

import lm_eval
import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED

from pi_lora.distributed import from_all
from pi_lora.errors import DataError, first_line
from pi_lora.evaluation.benchmarks.lm import RankedLM
from pi_lora.evaluation.benchmarks.scores import BenchmarkScores, TaskScore
from pi_lora.evaluation.benchmarks.tasks import find_tasks
from pi_lora.evaluation.forward import described
from pi_lora.evaluation.journal import Session
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import BenchmarksOptions
from pi_lora.types import Json, Progress, silent


def evaluate_benchmarks(loaded: Model, options: BenchmarksOptions, session: Session) -> BenchmarkScores:
    """Measure every task with inputs cut to a window, by default the original one; lm-eval divides the examples among
    the processes. Raise DataError if lm-eval cannot measure a task, and Interrupted on Ctrl-C.
    """
    # The config of a model tuned with `scaling: direct` has only L'.
    window = options.window or round(loaded.window / loaded.scale)
    options = options.changed(window=window)
    lm = RankedLM(loaded, window, options.batch_size)
    journal = session.journal(loaded, {**options.model_dump(), "lm_eval": lm_eval.__version__})
    return BenchmarkScores(
        **described(loaded) | {"window": window},
        options=options,
        lm_eval=lm_eval.__version__,
        tasks={
            name: measure(lm, name, tasks, options.limit, journal.folder, session.progress)
            for name, tasks in find_tasks(options).items()
        },
    )


def measure(
    lm: RankedLM,
    name: str,
    tasks: Json,
    limit: int | None = None,
    cache: Path | None = None,
    progress: Progress = silent,
) -> TaskScore:
    """Return the score on the first `limit` examples of each task; all processes call it. Raise DataError if the window
    does not hold an answer, or lm-eval cannot measure the task on such a model.
    """
    torch.manual_seed(DEFAULT_OTHER_SEED)
    try:
        results = lm.evaluate(tasks, limit, cache, lambda done, total: progress(done, total, name))
    except (
        AssertionError,
        ValueError,
        NotImplementedError,
    ) as error:  # of an answer beyond the window without a message
        raise DataError(
            f"{name}: lm-eval cannot measure it ({first_line(error)}); leave it out, or set a longer --window"
        ) from error
    [score] = from_all([_score(name, results)] if results else [])  # the first process has them
    return score


def _score(name: str, results: Json) -> TaskScore:
    scores = results["results"][name]
    numbers = {key.removesuffix(",none"): float(x) for key, x in scores.items() if "," in key and x != "N/A"}
    found: Json = {"examples": scores["sample_len"], "shots": results["n-shot"].get(name, 0)}
    if "acc" not in numbers:
        return TaskScore(**found, metrics=numbers)
    samples = sorted(results["samples"].get(name, []), key=lambda sample: sample["doc_id"])  # by process until here
    return TaskScore(
        **found,
        acc=numbers["acc"],
        stderr=numbers.get("acc_stderr"),
        acc_norm=numbers.get("acc_norm"),
        outcomes=[float(sample["acc"]) for sample in samples] or None,
    )
