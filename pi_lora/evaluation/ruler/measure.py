"""RULER of a model through lm-eval (Hsieh et al. 2024, arXiv 2404.06654): needles, chains of variables, frequent words
and questions in windows of several lengths. Text is written by lm-eval's own model class in batches, with a KV cache.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import lm_eval

from pi_lora.errors import DataError
from pi_lora.evaluation.benchmarks.answering import Answering
from pi_lora.evaluation.benchmarks.measure import quiet
from pi_lora.evaluation.forward import described, prompts_at_once
from pi_lora.evaluation.journal import journaled
from pi_lora.evaluation.results import RulerScores, RulerTask
from pi_lora.evaluation.ruler.effective import effective_length, mean_of, standard_error
from pi_lora.evaluation.ruler.prompts import Asked, check_essays, fitted, sentences
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import default_windows
from pi_lora.types import Progress, silent


def evaluate_ruler(
    loaded: Model,
    asked: Asked,
    windows: Sequence[int] | None = None,
    samples: int = 100,
    seed: int = 0,
    batch_size: int | None = None,
    chat_template: bool = False,
    progress: Progress = silent,
) -> RulerScores:
    """Measure each task at each window, by default L', L'/2, ... down to L, the shortest first. Every process has the
    whole model and continues its share of the batches, by default of as many prompts as 16,384 tokens hold; they are
    kept until all are measured. Raise DataError if a window holds no prompt of a task, and Interrupted on Ctrl-C.
    """
    windows = sorted(windows or default_windows(loaded.window, round(loaded.window / loaded.scale)))
    check_essays(asked, loaded.tokenizer, windows[-1])
    settings: dict[str, Any] = {"seed": seed, "samples": samples, "chat_template": chat_template}
    settings |= {"batch_size": batch_size, "lm_eval": lm_eval.__version__}
    decided_by = {**settings, "windows": windows, "tasks": asked.tasks, "data": asked.sources}
    each = len(asked.tasks) * samples
    lengths = []
    with journaled(loaded, decided_by, "batches") as journal:
        for number, window in enumerate(windows):
            with quiet():
                size = batch_size or prompts_at_once(window)
                answering = Answering(loaded.model, loaded.tokenizer, window, size, journal)
            # A chat template writes special tokens, which are what they stand for.
            answering.tokenizer.split_special_tokens = not chat_template
            tasks: dict[str, RulerTask] = {}
            for name in asked.tasks:
                before = number * each + len(tasks) * samples
                _report(answering, progress, before, samples, len(windows) * each)
                tasks[name] = _measure(answering, name, window, samples, seed, asked, chat_template)
            lengths.append(mean_of(window, tasks))
    return RulerScores(
        **described(loaded),
        **settings,
        data=asked.sources,
        sentences=sentences(asked),
        left_out=asked.left_out,
        lengths=lengths,
        effective_length=effective_length(lengths),
    )


def _report(answering: Answering, progress: Progress, before: int, samples: int, whole: int) -> None:
    """Move `progress` by the share of the batches that this process has continued."""

    def moved(done: int, total: int, note: str = "") -> None:
        progress(before + samples * done // total, whole, note)

    answering.progress = moved


def _measure(
    answering: Answering, name: str, window: int, samples: int, seed: int, asked: Asked, chat_template: bool
) -> RulerTask:
    """Return the score of a task at a window, as lm-eval scores it; progress shows the mean of what is known."""
    chat = answering.apply_chat_template if chat_template else None
    task, length, tokens = fitted(
        name, window, samples, seed, asked, answering.tokenizer, lambda text: _length(answering, text), chat
    )
    requests, known = task.instances, list[float]()

    def score(index: int, text: str) -> float:
        return float(task.process_results(requests[index].doc, [text])[str(length)])

    def note(indices: Sequence[int], texts: Sequence[str]) -> str:
        known.extend(map(score, indices, texts))
        return f"{name} at {window:,}: {fmean(known):.0%}"

    answering.note, answering.truncated_inputs = note, 0
    with quiet():
        texts = answering.generate_until(requests)
    if cut := answering.truncated_inputs:
        raise DataError(f"{name}: {cut} prompts do not fit {window} tokens; choose longer --windows")
    outcomes = [score(index, text) for index, text in enumerate(texts)]
    return RulerTask(
        score=sum(outcomes) / len(outcomes),
        stderr=standard_error(outcomes),
        samples=len(outcomes),
        length=length,
        tokens=tokens,
        outcomes=outcomes,
    )


def _length(answering: Answering, text: str) -> int:
    """Return the tokens of a prompt as the model reads it."""
    return int(answering.tok_batch_encode([text])[0].shape[1])
