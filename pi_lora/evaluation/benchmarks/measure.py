"""Short-context benchmarks at a model's original window, with the prompts, truncation and metrics of the installed
lm-eval.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import set_torch_seed

from pi_lora.distributed import from_all
from pi_lora.errors import DataError, first_line
from pi_lora.evaluation.benchmarks.lm import RankedLM
from pi_lora.evaluation.benchmarks.scores import TITLES, BenchmarkScores, TaskScore
from pi_lora.evaluation.benchmarks.tasks import Prepared
from pi_lora.evaluation.forward import described
from pi_lora.evaluation.journal import Session
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import BenchmarksOptions
from pi_lora.types import Json, Progress, silent


def evaluate_benchmarks(
    loaded: Model, options: BenchmarksOptions, prepared: dict[str, Prepared], session: Session | None = None
) -> BenchmarkScores:
    """Measure each prepared task, inputs cut to a window, by default the original one; lm-eval divides the examples
    among the processes. Raise DataError if lm-eval cannot measure a task, and Interrupted on Ctrl-C.
    """
    session = session or Session()
    # The config of a model tuned with `scaling: direct` tells only L'.
    window = options.window or round(loaded.window / loaded.scale)
    decided_by = options.model_dump() | {"lm_eval": lm_eval.__version__, "window": window}
    lm = RankedLM(loaded, window, options.batch_size)
    journal = session.journal(loaded, decided_by)
    tasks = {
        name: measure(lm, name, tasks, options.limit, journal.folder, session.progress)
        for name, (_, tasks) in prepared.items()
    }
    return BenchmarkScores(
        **described(loaded) | {"window": window},
        options=options.changed(window=window),
        lm_eval=lm_eval.__version__,
        metric="acc, lm-eval's: the likeliest choice, its likelihood not divided by its length",
        data={name: task.source for name, task in prepared.items()},
        tasks=tasks,
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
    set_torch_seed(DEFAULT_OTHER_SEED)
    title = TITLES.get(name, name)
    try:
        results = lm.evaluate(tasks, limit, cache, lambda done, total, note="": progress(done, total, title))
    except (AssertionError, ValueError, NotImplementedError) as error:
        too_long = f"an answer is longer than the window of {lm.max_length} tokens"  # asserted without a word
        reason = first_line(error) if str(error) else too_long
        raise DataError(f"{name}: lm-eval cannot measure it ({reason}); leave it out, or set --window") from error
    return from_all([_score(lm, name, results) if results else None])[0]  # type: ignore[return-value]


def _score(lm: RankedLM, name: str, results: Json) -> TaskScore:
    scores, samples = results["results"][name], results["samples"]
    numbers = {key.removesuffix(",none"): float(x) for key, x in scores.items() if "," in key and x != "N/A"}
    found: Json = {
        "examples": scores["sample_len"],
        "shots": results["n-shot"].get(name, 0),
        "truncated_inputs": sum(_truncated(lm, of_task) for of_task in samples.values()),
    }
    if "acc" not in numbers:
        found["metrics"] = numbers
    else:
        found |= {"acc": numbers["acc"], "stderr": numbers.get("acc_stderr")}
        if name in samples:
            by_example = sorted(samples[name], key=lambda sample: sample["doc_id"])  # processes come one by one
            found["outcomes"] = [float(sample["acc"]) for sample in by_example]
    found |= {"acc_norm": numbers["acc_norm"]} if "acc_norm" in numbers else {}
    return TaskScore.model_validate(found)


def _truncated(lm: RankedLM, samples: Sequence[Any]) -> int:
    """Return how many inputs of a task are cut; lm-eval lists them once for each filter of the answers."""
    inputs = chain.from_iterable(each["arguments"] for each in samples if each["filter"] == samples[0]["filter"])
    return sum(_is_truncated(lm, *arguments) for arguments in inputs)


def _is_truncated(lm: RankedLM, context: str, answer: str | Json | None = None) -> bool:
    if answer is None:  # of a rolling perplexity
        return False
    if isinstance(answer, str):
        return bool(len(lm.tok_encode(context + answer)) > lm.max_length + 1)
    written = normalize_gen_kwargs(answer, lm.max_gen_toks)["max_gen_toks"]
    return bool(len(lm.tok_encode(context)) + written > lm.max_length)
