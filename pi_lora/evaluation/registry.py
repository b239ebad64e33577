"""Every measurement, a line each, and the files that hold their scores."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pi_lora.errors import ModelError
from pi_lora.evaluation.benchmarks.measurement import Benchmarks
from pi_lora.evaluation.former import former_measurement
from pi_lora.evaluation.measurement import Measurement, Scores, as_json
from pi_lora.evaluation.metrics import Metric
from pi_lora.evaluation.passkey.measurement import Passkey
from pi_lora.evaluation.perplexity.measurement import Perplexity
from pi_lora.evaluation.ruler.measurement import Ruler
from pi_lora.evaluation.summarization.measurement import Summarization
from pi_lora.writing import first_problem, read_json, write_json

# Named as the sections of a recipe's `evaluation` and the files in a run's scores; the paper's are first, in its order.
MEASUREMENTS: Mapping[str, Measurement[Any, Any]] = {
    "perplexity": Perplexity(),
    "passkey": Passkey(),
    "benchmarks": Benchmarks(),
    "ruler": Ruler(),
    "summarization": Summarization(),
}


def metrics_of(scores: Scores) -> list[Metric]:
    """Return the metrics of any scores."""
    return MEASUREMENTS[scores.measurement].metrics(scores)


# No count, score or loss is larger.
MOST = 1e15


def read_scores(file: Path) -> Scores | None:
    """Return the scores in a file, or None if it holds none; raise ModelError if it is no JSON or a field is wrong."""
    again = "measure again or remove it"
    content: Any = read_json(file, object, again)
    if not isinstance(content, dict):
        return None
    name = content.pop("measurement", None) or former_measurement(content)
    if name is None or name not in MEASUREMENTS:
        return None
    if not all(abs(number) <= MOST for number in _numbers(content)):
        raise ModelError(f"{file}: has a number that is infinite, NaN or more than {MOST:.0e}; {again}")
    try:
        scores: Scores = MEASUREMENTS[name].scores.model_validate(content)
        return scores
    except ValidationError as error:
        raise ModelError(f"{file}: {first_problem(error)}; {again}") from None


def _numbers(content: Any) -> Iterator[float]:
    if isinstance(content, int | float):
        yield content
    elif isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _numbers(part)


def write_scores(scores: Scores | Sequence[Scores], file: Path) -> None:
    """Write scores, of several models as a list; raise DataError if the file cannot be written."""
    each = [as_json(one) for one in ([scores] if isinstance(scores, Scores) else scores)]
    write_json(file, each if len(each) > 1 else each[0])
