"""Every measurement, a line each, and the files that hold their scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pi_lora.errors import ModelError
from pi_lora.evaluation.benchmarks import Benchmarks
from pi_lora.evaluation.chat import Chats
from pi_lora.evaluation.measurement import Measurement, Scores, as_json
from pi_lora.evaluation.metrics import Metric
from pi_lora.evaluation.passkey.measurement import Passkey
from pi_lora.evaluation.perplexity.measurement import Perplexity
from pi_lora.evaluation.ruler import Ruler
from pi_lora.evaluation.summarization import Summarization
from pi_lora.writing import first_problem, read_json, write_json

# Named as the sections of a recipe's `evaluation` and the files in a run's scores; the paper's are first, in its order.
MEASUREMENTS: Mapping[str, Measurement[Any, Any]] = {
    "perplexity": Perplexity(),
    "passkey": Passkey(),
    "benchmarks": Benchmarks(),
    "ruler": Ruler(),
    "summarization": Summarization(),
    "chat": Chats(),
}


# Options that change how long a measurement takes or what it writes besides, but no metric that is compared.
CHANGE_NO_NUMBER = {"batch_size", "predictions", "by_position"}


def metrics_of(scores: Scores) -> list[Metric]:
    """Return the metrics of any scores."""
    return MEASUREMENTS[scores.measurement].metrics(scores)


def setting_of(scores: Scores) -> str:
    """Return on which text and how scores were measured."""
    return MEASUREMENTS[scores.measurement].about([scores])


def differences(scores: Scores, other: Scores) -> list[str]:
    """Return the options in which two scores were measured otherwise; they compare where there are none.

    Options that change no number are left out. Older scores without options differ by what is known of them.
    """
    if scores.options is None or other.options is None:
        return [] if setting_of(scores) == setting_of(other) else ["settings"]
    mine, others = (each.options.model_dump(exclude=CHANGE_NO_NUMBER) for each in (scores, other))
    return [key.replace("_", " ") for key in mine | others if mine.get(key) != others.get(key)]


def read_scores(file: Path) -> Scores | None:
    """Return the scores in a file, or None if it holds none; raise ModelError if it is no JSON or a field is wrong.
    Files that do not name their measurement are named after it: `perplexity-base.json`.
    """
    again = "measure again or remove it"
    content: Any = read_json(file, object, again)
    if not isinstance(content, dict):
        return None
    name = content.pop("measurement", file.stem.partition("-")[0])
    if name not in MEASUREMENTS:
        return None
    try:
        scores: Scores = MEASUREMENTS[name].scores.model_validate(content)
        return scores
    except ValidationError as error:
        raise ModelError(f"{file}: {first_problem(error)}; {again}") from None


def write_scores(scores: Scores | Sequence[Scores], file: Path) -> None:
    """Write scores, of several models as a list; raise DataError if the file cannot be written."""
    every = [as_json(each) for each in ([scores] if isinstance(scores, Scores) else scores)]
    write_json(file, every if len(every) > 1 else every[0])
