"""ROUGE of a model's summaries, which are kept in a file as they come, so that an interrupted measurement continues."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pi_lora.data.examples import Account, Prompt, Prompter, Task, prompted
from pi_lora.data.sources import SCROLLS, Table, find_table
from pi_lora.distributed import share_of, wait_for_all
from pi_lora.errors import DataError, Interrupted
from pi_lora.evaluation.results import SummarizationScores
from pi_lora.evaluation.summarization.rouge import HOW, ROUGES, rouge
from pi_lora.evaluation.summarization.writing import Sampling, Say, Writer
from pi_lora.recipe.schema import Data
from pi_lora.run import Run
from pi_lora.types import Json, Progress, silent
from pi_lora.writing import write_whole

GOVREPORT: Json = {"source": {"name": SCROLLS, "subset": "gov_report"}, "document": "input", "summary": "output"}
# Columns of a user's own rows unless they say: the words of the recipe's keys.
COLUMNS: Json = {"source": {}, "document": "document", "summary": "summary"}
# What tokenizing a prompt as a whole may cost of a document's tokens.
SLACK_TOKENS = 16

# A prompt by the name of its row, and the text that its answer is compared with.
Questions = Mapping[str, tuple[Prompt, str]]


class Predictions:
    """`predictions.jsonl`: for each example its `id`, the `prediction`, the `reference`, and the key of what decides
    it; a file with another key is refused, a line that was cut off dropped. Several processes may append a line at a
    time.
    """

    def __init__(self, file: Path, decided_by: Json) -> None:
        self.file = file
        self.key = hashlib.sha256(json.dumps(decided_by, sort_keys=True).encode()).hexdigest()[:16]
        self.found = self.read()

    def read(self) -> dict[str, Json]:
        """Return the lines by name, also those that other processes have added."""
        if not self.file.is_file():
            return {}
        try:
            # Not splitlines(): it splits at U+2028 and its like, which files of earlier versions hold as they are.
            *whole, begun = self.file.read_text(encoding="utf-8").split("\n")
            lines = {line["id"]: line for line in map(json.loads, whole)}
            others = {line["key"] for line in lines.values()} - {self.key}
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise DataError(f"{self.file}: holds something else than predictions; name another --predictions") from None
        if others:
            other = "holds predictions of another model, data or setting"
            raise DataError(f"{self.file}: {other}; remove it, or name another --predictions")
        if begun:
            write_whole(self.file, "".join(f"{line}\n" for line in whole))
        return lines

    def add(self, name: str, **line: Any) -> None:
        """Keep a prediction."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"id": name, **line, "key": self.key}) + "\n")
        except OSError as error:
            raise DataError(f"{self.file}: cannot be written ({error.strerror}); name another --predictions") from None


def evaluation_data(model: str, source: Mapping[str, Any], asked: Mapping[str, Any]) -> Data:
    """Return the rows to measure `model` on, and their prompts, as a recipe's `data`: `source` where it has a name,
    else what the run was tuned on if that were examples, else GovReport; of the validation split unless `source` says.
    Keys of `asked` go first; None is ignored. Raise DataError if keys do not go together.
    """
    source, asked = ({key: x for key, x in given.items() if x is not None} for given in (source, asked))
    run = Run(Path(model))
    tuned_on = run.recipe.data if run.has_recipe else None
    own = dict(COLUMNS if "name" in source else GOVREPORT)
    if tuned_on is not None and tuned_on.has_examples:
        own = tuned_on.model_dump()
        own["source"] = {} if "name" in source else own["source"][0]
    if "template" in asked:
        own |= {"document": None, "summary": None, "completion": None}
    elif "document" in asked and "summary" in asked:
        own |= {"template": None, "completion": None}
    rows = {**own["source"], "split": "validation", **source}
    try:
        return Data.model_validate({**own, **asked, "source": rows})
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise DataError(f"--{key or 'data'}: {problem['msg'].removeprefix('Value error, ')}") from None


def evaluate_summarization(
    writer: Writer,
    data: Data,
    sampling: Sampling,
    file: Path,
    limit: int | None = None,
    progress: Progress = silent,
    say: Say = lambda line: None,
) -> SummarizationScores:
    """Score by ROUGE what `writer` writes for the first `limit` rows of `data`; each process writes its part.
    Predictions go to `file` as they come; those that are there are not written again. Raise DataError if the data
    cannot be read, lacks a column or holds nothing, or the window is too short, and Interrupted on Ctrl-C.
    """
    task = replace(Task.of(data), completion_tokens=sampling.max_new_tokens)
    table = find_table(data.source[0])
    account = Account()
    questions = _questions(table, Prompter(task, writer.tokenizer, writer.window), limit, account)
    cut = [prompt.kept for prompt, _ in questions.values() if prompt.kept < prompt.document_tokens]
    for line in account.left_out:
        say(line)
    if short := [kept for kept in cut if kept < data.document_tokens - SLACK_TOKENS]:
        say(
            f"{writer.name}: reads {writer.window:,} tokens; {len(short):,} of {len(questions):,} documents are cut to "
            f"their first {min(short):,} and not to {data.document_tokens:,}"
        )
    made_from = {"data": table.identity(), "source": data.source[0].model_dump(), "task": asdict(task)}
    predictions = Predictions(file, {**made_from, "sampling": asdict(sampling), "model": writer.identity})
    # No process may begin to add before all have read what there is.
    wait_for_all()
    _write(writer, questions, sampling, predictions, progress)
    wait_for_all()
    written = predictions.read()
    lines = [written[name] for name in questions]
    scores = rouge([line["prediction"] for line in lines], [line["reference"] for line in lines])
    means = {name: scores[name].mean for name in ROUGES}
    return SummarizationScores(
        **{**writer.facts, "window": writer.window},
        data=data.source[0].model_dump(),
        task=asdict(task),
        sampling=asdict(sampling),
        metric=HOW,
        examples=len(questions),
        left_out={"empty": len(account.empty), "too_long": len(account.too_long)},
        documents_cut=len(cut),
        ended=sum(line["ended"] for line in lines),
        predictions=str(file),
        **means,
        # By which SCROLLS ranks.
        geometric_mean=math.prod(means.values()) ** (1 / len(means)),
        intervals={name: (scores[name].low, scores[name].high) for name in ROUGES},
    )


def _questions(table: Table, prompter: Prompter, limit: int | None, account: Account) -> Questions:
    """Empty rows, and those whose prompt does not fit, go to the account."""
    task = prompter.task
    batches = prompted(table.read(task.columns, None), prompter, account, limit)
    found = {where: (prompt, row[task.completion]) for batch in batches for where, row, prompt in batch}
    if not found:
        window = prompter.longest + task.completion_tokens + 1
        no_room = f"leave no room for a document of {table.name} in the window of {window} tokens"
        advice = "choose fewer, or a model that reads more"
        raise account.nothing(table.name, f"--max-new-tokens: {task.completion_tokens} {no_room}; {advice}")
    return found


def _write(
    writer: Writer, questions: Questions, sampling: Sampling, predictions: Predictions, progress: Progress
) -> None:
    mine = share_of(list(questions))
    left = {name: questions[name][0].ids for name in mine if name not in predictions.found}
    progress(len(mine) - len(left), len(mine))
    # The rest of an interrupted run has a seed of its own: the same numbers are not drawn twice.
    own = replace(sampling, seed=sampling.seed + len(predictions.found))
    try:
        for done, (name, ids) in enumerate(writer.write(left, own) if left else (), len(mine) - len(left) + 1):
            text = writer.tokenizer.decode(ids, skip_special_tokens=True).strip()
            ended = writer.tokenizer.eos_token_id in ids
            predictions.add(name, prediction=text, reference=questions[name][1], tokens=len(ids), ended=ended)
            progress(done, len(mine))
    except KeyboardInterrupt:
        kept = f"{predictions.file}: interrupted; what was written is kept, the same command goes on from there"
        raise Interrupted(kept) from None
