"""Short-context benchmarks (paper, table 5) through lm-eval: model and tokenizer in, accuracies out.

Task definitions, prompts, truncation and metrics are lm-eval's: what is ours is where the examples come from, and, in
`answering.py`, who computes which batch. Nothing else of the package imports lm-eval.
"""

import contextlib
import importlib.metadata
import io
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.evaluator import evaluate

from pi_lora.errors import DataError
from pi_lora.evaluation.benchmarks.answering import Answering
from pi_lora.evaluation.benchmarks.local_data import SCHEMAS, Row, articles
from pi_lora.evaluation.journal import Journal


@dataclass(frozen=True)
class Definition:
    """lm-eval's own definition of a task: its file below `lm_eval/tasks`, the split it measures, and what we change."""

    file: str
    split: str
    changes: tuple[tuple[str, str], ...] = ()


# lm-eval's `race` is RACE-H, and its data set has no other part. RACE-M is the same task on the authors' middle school
# part, whose rows hold a question each and not an article.
DEFINITIONS = {
    "boolq": Definition("super_glue/boolq/default.yaml", "validation"),
    "piqa": Definition("piqa/piqa.yaml", "validation"),
    "race_middle": Definition("race/race.yaml", "test", (("dataset_path", "ehovy/race"), ("dataset_name", "middle"))),
    "race_high": Definition("race/race.yaml", "test"),
    "winogrande": Definition("winogrande/default.yaml", "validation"),
}


@dataclass(frozen=True)
class BenchmarkScore:
    """Accuracy and its standard error over `examples`; `acc_norm` (by the length of each choice) where lm-eval has it.

    `stderr` is None for a single example. `truncated_inputs` counts the inputs (of one choice each)
    whose beginning did not fit.
    """

    acc: float
    stderr: float | None
    examples: int
    truncated_inputs: int
    acc_norm: float | None = None


def version() -> str:
    """Of lm-eval."""
    return importlib.metadata.version("lm_eval")


def load_task(name: str, examples: Sequence[Row] | None) -> Any:
    """lm-eval's task `name` on `examples`, in the schema of its data set, or else on its data set from the hub.

    Raises:
        DataError: the hub cannot be asked, or has no such data set any more.
    """
    with tempfile.TemporaryDirectory() as folder, _quiet(), contextlib.redirect_stderr(io.StringIO()):
        _write_definition(Path(folder), name, examples)
        manager = lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False)
        try:
            return manager.load([name])["tasks"][name]
        except Exception as error:
            if examples is not None:
                raise
            # `datasets` raises a dozen kinds for what a user can mend: offline, gone, gated.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{SCHEMAS[name].title}: cannot be had from the hub ({reason}); check the network, "
                f"or give its file with --data {name}=FILE"
            ) from error


def benchmark(
    model: Any,
    tokenizer: Any,
    task: Any,
    window: int,
    limit: int | None = None,
    batch_size: int = 8,
    journal: Journal | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BenchmarkScore:
    """Zero-shot accuracy on the first `limit` examples of `task` (from `load_task`), inputs cut to `window` tokens.

    All processes call it, each computes its share of the batches, and all get the same score.

    Raises:
        DataError: `window` does not hold an answer.
    """
    with _quiet():
        answering = Answering(model, tokenizer, window, batch_size, journal, progress)
    with _quiet(), contextlib.redirect_stderr(io.StringIO()):
        found = evaluate(answering, {"tasks": {task.task_name: task}}, limit=limit, log_samples=False)
    scores, examples = found["results"][task.task_name], found["n-samples"][task.task_name]["effective"]
    stderr = scores["acc_stderr,none"]
    return BenchmarkScore(
        scores["acc,none"],
        stderr if isinstance(stderr, float) else None,
        examples,
        answering.truncated_inputs,
        scores.get("acc_norm,none"),
    )


def race_articles(questions: Any) -> Any:
    """A `datasets.Dataset` of RACE's questions as one of articles; lm-eval calls it by its name in the task file."""
    return type(questions).from_list(articles(questions))


def _write_definition(folder: Path, name: str, examples: Sequence[Row] | None) -> None:
    """A task file that includes lm-eval's own, and changes where its examples come from."""
    definition = DEFINITIONS[name]
    base = Path(lm_eval.tasks.__file__).parent / definition.file
    content: dict[str, Any] = {"include": str(base), "task": name, "num_fewshot": 0, **dict(definition.changes)}
    own_rows = ""
    if examples is not None:
        rows = folder / "rows"
        rows.mkdir()
        file = rows / f"{definition.split}.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in examples), encoding="utf-8")
        content |= {
            # A folder: of `json` and a file, `datasets` (5.2) would tell its servers that it was used.
            "dataset_path": str(rows),
            "dataset_name": None,
            "training_split": None,
            "dataset_kwargs": {"cache_dir": str(folder / "cache"), "keep_in_memory": True},
        }
    elif name == "race_middle":
        own_rows = f"process_docs: !function {__name__}.race_articles\n"
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content) + own_rows, encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval warns of what is as it should be: a model that is loaded already, inputs longer than the window."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
