"""Predictions in a file, a line each as they come, so that an interrupted measurement goes on."""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pi_lora.data.examples import Account, filled, in_batches
from pi_lora.data.prompts import Prompt, Prompter, Task
from pi_lora.data.tables import Table, find_table
from pi_lora.distributed import share_of, wait_for_all
from pi_lora.errors import DataError, Interrupted
from pi_lora.evaluation.summarization.rouge import HOW, ROUGES, geometric_mean, rouge
from pi_lora.evaluation.summarization.writing import Sampling, Writer
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.recipe.schema import Data
from pi_lora.types import Json, Progress

Line = dict[str, Any]


class Predictions:
    """`predictions.jsonl`: for each example its `id`, the `prediction`, the `reference`, and the key of what made it.

    The key is of all that decides a prediction, so that those of another model or setting are not taken for these. A
    line that a crash cut off is dropped. Several processes may append to one file, a line at a time.

    Raises:
        DataError: the file holds other predictions, or cannot be read or written.
    """

    def __init__(self, file: Path, decided_by: Mapping[str, Any]) -> None:
        self.file = file
        self.key = hashlib.sha256(json.dumps(decided_by, sort_keys=True).encode()).hexdigest()[:16]
        self.found = {line["id"]: line for line in self._lines()}

    def read_again(self) -> None:
        """Take note of what other processes have added."""
        self.found = {line["id"]: line for line in self._lines()}

    def add(self, name: str, prediction: str, reference: str, **more: Any) -> None:
        """Keep a prediction."""
        line = {"id": name, "prediction": prediction, "reference": reference, **more, "key": self.key}
        self.found[name] = line
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as error:
            raise DataError(f"{self.file}: cannot be written ({error.strerror}); name another --predictions") from None

    def _lines(self) -> list[Line]:
        if not self.file.is_file():
            return []
        try:
            lines = self.file.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            found = [json.loads(line) for line in whole]
            keys = {line["key"] for line in found}
        except (OSError, ValueError, TypeError, KeyError):
            raise DataError(f"{self.file}: holds something else than predictions; name another --predictions") from None
        if keys - {self.key}:
            raise DataError(
                f"{self.file}: holds predictions of another model, data or setting; "
                "remove it, or name another --predictions"
            )
        if len(whole) < len(lines):
            self.file.write_text("".join(whole), encoding="utf-8")
        return found


GOVREPORT = {
    "source": {"name": "tau/scrolls", "subset": "gov_report"},
    "document": "input",
    "summary": "output",
}
# Columns of a user's own rows unless they say: the words of the recipe's keys.
COLUMNS = {"document": "document", "summary": "summary"}
EVALUATION_SPLIT = "validation"


def task_of(model: str) -> dict[str, Any] | None:
    """The `data` section of the recipe that a run was tuned under, if it was on examples."""
    file = Path(model) / RECIPE_FILE
    data = load_recipe(file).recipe.data if file.is_file() else None
    return data.model_dump() if data is not None and data.has_examples else None


def evaluation_data(model: str, source: Mapping[str, Any], asked: Mapping[str, Any]) -> Data:
    """The rows to measure `model` on: those of `source` where it has a name, else those of the run's recipe, else
    GovReport's; of the validation split unless `source` says. `asked` are keys of a recipe's `data` that go first.

    Raises:
        DataError: keys that do not go together.
    """
    tuned_on = task_of(model)
    own = dict(tuned_on or ({**GOVREPORT} if "name" not in source else COLUMNS))
    if "template" in asked:
        own = {key: value for key, value in own.items() if key not in ("document", "summary", "completion")}
    if "document" in asked and "summary" in asked:
        own = {key: value for key, value in own.items() if key not in ("template", "completion")}
    first = own["source"][0] if tuned_on else own.get("source", {})
    rows = {"split": EVALUATION_SPLIT, **source} if "name" in source else {**first, "split": EVALUATION_SPLIT, **source}
    try:
        return Data.model_validate({**own, **asked, "source": rows})
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise DataError(f"--{key or 'data'}: {problem['msg'].removeprefix('Value error, ')}") from None


@dataclass(frozen=True)
class Question:
    """A prompt that is to be answered, and the text that its answer is compared with."""

    prompt: Prompt
    reference: str


def evaluate_summarization(
    writer: Writer,
    data: Data,
    sampling: Sampling,
    file: Path,
    limit: int | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Json:
    """ROUGE of what `writer` writes for the rows of `data`, of which `limit` takes the first.

    Predictions go into `file` as they come; those that are there are not written again. Every process has the whole
    model and writes its part. `say` is told what a user should know, a line each.

    Raises:
        DataError: the data cannot be read, lacks a column or holds nothing, or the window is too short for the task.
        Interrupted: by Ctrl-C; the predictions that were made are kept.
    """
    task = replace(Task.of(data), completion_tokens=sampling.max_new_tokens)
    table = find_table(data.source[0])
    account = Account()
    questions = _questions(table, Prompter(task, writer.tokenizer, writer.window), limit, account)
    if say:
        _tell(say, writer, data, questions, account)
    decided_by = {"data": table.identity(), "source": data.source[0].model_dump(), "task": asdict(task)}
    predictions = Predictions(file, {**decided_by, "sampling": asdict(sampling), "model": writer.identity})
    # No process may begin to add before all have read what there is.
    wait_for_all()
    try:
        _write(writer, questions, sampling, predictions, progress)
    except KeyboardInterrupt:
        raise Interrupted(
            f"{file}: interrupted; what was written is kept, the same command goes on from there"
        ) from None
    wait_for_all()
    predictions.read_again()
    lines = [predictions.found[name] for name in questions]
    scores = rouge([line["prediction"] for line in lines], [line["reference"] for line in lines])
    return {
        **writer.facts,
        "window": writer.window,
        "data": data.source[0].model_dump(),
        "task": asdict(task),
        "sampling": asdict(sampling),
        "metric": HOW,
        "examples": len(questions),
        "left_out": {"empty": len(account.empty), "too_long": len(account.too_long)},
        "documents_cut": sum(each.prompt.kept < each.prompt.document_tokens for each in questions.values()),
        "ended": sum(line["ended"] for line in lines),
        "predictions": str(file),
        **{name: scores[name].mean for name in ROUGES},
        "geometric_mean": geometric_mean(scores),
        "intervals": {name: [scores[name].low, scores[name].high] for name in ROUGES},
    }


def _questions(table: Table, prompter: Prompter, limit: int | None, account: Account) -> dict[str, Question]:
    """By the name of the row; empty rows, and those whose prompt does not fit, go to the account."""
    task = prompter.task
    found = {}
    for batch in in_batches(itertools.islice(filled(table.rows(task.columns), account), limit)):
        for (where, row), prompt in zip(batch, prompter.prompts([row for _, row in batch]), strict=True):
            if prompt.fits:
                found[where] = Question(prompt, row[task.completion])
            else:
                account.too_long.append(where)
    if found:
        return found
    if account.too_long:
        raise DataError(
            f"--max-new-tokens: {task.completion_tokens} leave no room for a document of {table.name} in the window of "
            f"{prompter.longest + task.completion_tokens + 1} tokens; choose fewer, or a model that reads more"
        )
    if account.empty:
        raise DataError(f"{table.name}: a column is empty in all of {len(account.empty):,} rows; name others")
    raise DataError(f"{table.name}: holds no rows; name a source that does")


def _tell(
    say: Callable[[str], None], writer: Writer, data: Data, questions: dict[str, Question], account: Account
) -> None:
    for line in account.left_out:
        say(line)
    cut = [each.prompt for each in questions.values() if each.prompt.kept < each.prompt.document_tokens]
    # A token or two less is what tokenizing the whole prompt costs.
    short = [prompt.kept for prompt in cut if prompt.kept < data.document_tokens - 16]
    if short:
        say(
            f"{writer.name}: reads {writer.window:,} tokens; {len(short):,} of {len(questions):,} documents are cut to "
            f"their first {min(short):,} and not to {data.document_tokens:,}"
        )


def _write(
    writer: Writer, questions: dict[str, Question], sampling: Sampling, predictions: Predictions, progress: Any
) -> None:
    mine = share_of(list(questions))
    left = [name for name in mine if name not in predictions.found]
    if progress:
        progress(len(mine) - len(left), len(mine))
    if not left:
        return
    # What is left of an interrupted run is drawn anew.
    own = replace(sampling, seed=sampling.seed + len(predictions.found))
    end = writer.tokenizer.eos_token_id
    written = writer.write({name: questions[name].prompt.ids for name in left}, own)
    for done, (name, ids) in enumerate(written, len(mine) - len(left) + 1):
        text = writer.tokenizer.decode(ids, skip_special_tokens=True).strip()
        predictions.add(name, text, questions[name].reference, tokens=len(ids), ended=end in ids)
        if progress:
            progress(done, len(mine))
