"""ROUGE of a model's summaries, each of which is kept as it comes, so that an interrupted measurement continues."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel, ValidationError

from pi_lora.data.examples import Account, Prompt, Prompter, Task, prompted
from pi_lora.data.sources import SCROLLS, Table, find_table
from pi_lora.distributed import is_leader
from pi_lora.errors import DataError
from pi_lora.evaluation.journal import Journal, Session
from pi_lora.evaluation.summarization.rouge import HOW, rouge
from pi_lora.evaluation.summarization.scores import ROUGES, SummarizationScores
from pi_lora.evaluation.summarization.writing import Writer
from pi_lora.recipe.evaluation import SummarizationOptions
from pi_lora.recipe.schema import Data
from pi_lora.run import Run
from pi_lora.types import Json, Progress
from pi_lora.writing import write_whole

GOVREPORT: Json = {"source": {"name": SCROLLS, "subset": "gov_report"}, "document": "input", "summary": "output"}
# Columns of a user's own rows unless they say: the words of the recipe's keys.
COLUMNS: Json = {"source": {}, "document": "document", "summary": "summary"}
# What tokenizing a prompt as a whole may cost of a document's tokens.
SLACK_TOKENS = 16

# A prompt by the name of its row, and the text that its answer is compared with.
Questions = Mapping[str, tuple[Prompt, str]]


class Summary(BaseModel):
    """What was written after a prompt: the text, its tokens, whether it ended, and the seed it was drawn with."""

    prediction: str
    tokens: int
    ended: bool
    seed: int


def evaluation_data(model: str, options: SummarizationOptions) -> Data:
    """Return the rows to measure `model` on, and their prompts, as a recipe's `data`: those of the options if they name
    data, else what the run was tuned on if that were examples, else GovReport; of the validation split unless the
    options say. Raise DataError if keys do not go together.
    """
    keys = ("document", "summary", "template", "completion", "document_tokens")
    given = options.model_dump(include=set(keys), exclude_none=True)
    given |= {"completion_tokens": options.max_new_tokens} if options.max_new_tokens else {}
    given |= {"special_tokens": True} if options.special_tokens else {}
    source = {"name": options.data, "subset": options.subset, "split": options.split}
    source = {key: value for key, value in source.items() if value is not None}
    run = Run(Path(model))
    tuned_on = run.recipe.data if run.has_recipe else None
    own = dict(COLUMNS if options.data else GOVREPORT)
    if tuned_on is not None and tuned_on.has_examples:
        own = tuned_on.model_dump()
        own["source"] = {} if options.data else own["source"][0]
    if options.template:
        own |= {"document": None, "summary": None, "completion": None}
    elif options.document and options.summary:
        own |= {"template": None, "completion": None}
    rows = {**own["source"], "split": "validation", **source}
    try:
        return Data.model_validate({**own, **given, "source": rows})
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise DataError(f"--{key or 'data'}: {problem['msg'].removeprefix('Value error, ')}") from None


def complete(options: SummarizationOptions, data: Data) -> SummarizationOptions:
    """Return the options with what `evaluation_data` found, so that another model is measured on the same rows."""
    keys = ("document", "summary", "template", "completion", "document_tokens", "special_tokens")
    source = data.source[0]
    named = {"data": source.name, "subset": source.subset, "split": source.split}
    return options.changed(**data.model_dump(include=set(keys)), **named, max_new_tokens=data.completion_tokens)


def evaluate_summarization(writer: Writer, options: SummarizationOptions, session: Session) -> SummarizationScores:
    """Score by ROUGE what `writer` writes; if the session is shared, each process writes its share, and what is written
    is kept until all is. Raise DataError if the data cannot be read, lacks a column or holds nothing, or the window is
    too short.
    """
    data = evaluation_data(writer.name, options)
    options = complete(options, data)
    task, table, account = Task.of(data), find_table(data.source[0]), Account()
    questions = _questions(table, Prompter(task, writer.tokenizer, writer.window), options.limit, account)
    cut = [prompt.kept for prompt, _ in questions.values() if prompt.kept < prompt.document_tokens]
    for line in account.left_out:
        session.say(line)
    if short := [kept for kept in cut if kept < data.document_tokens - SLACK_TOKENS]:
        session.say(
            f"{writer.name}: reads {writer.window:,} tokens; {len(short):,} of {len(questions):,} documents are cut to "
            f"their first {min(short):,} and not to {data.document_tokens:,}"
        )
    options_kept = options.changed(predictions=None)
    decided_by = {"data": table.identity(), "task": asdict(task), "options": options_kept.model_dump()}
    written = _written(writer, questions, options, session.journal_of(writer.identity, decided_by), session.progress)
    if options.predictions and is_leader():
        lines = [
            json.dumps({"id": name, **summary.model_dump(), "reference": questions[name][1]}) + "\n"
            for name, summary in written.items()
        ]
        write_whole(Path(options.predictions), "".join(lines))
    scores = rouge([written[name].prediction for name in questions], [text for _, text in questions.values()])
    means = {name: scores[name].mean for name in ROUGES}
    return SummarizationScores(
        **{**writer.facts, "window": writer.window},
        options=options_kept,
        data=data.source[0].model_dump(),
        task=asdict(task),
        metric=HOW,
        examples=len(questions),
        left_out={"empty": len(account.empty), "too_long": len(account.too_long)},
        documents_cut=len(cut),
        ended=sum(summary.ended for summary in written.values()),
        seeds=sorted({summary.seed for summary in written.values()}),
        predictions=options.predictions,
        **means,
        # By which SCROLLS ranks.
        geometric_mean=math.prod(means.values()) ** (1 / len(means)),
        intervals={name: (scores[name].low, scores[name].high) for name in ROUGES},
    )


def _questions(table: Table, prompter: Prompter, limit: int | None, account: Account) -> Questions:
    """Empty rows, and those whose prompt does not fit, go to the account."""
    task = prompter.task
    batches = prompted(table.read(task.columns, None), prompter, account, limit)
    questions = {where: (prompt, row[task.completion]) for batch in batches for where, row, prompt in batch}
    if not questions:
        window = prompter.longest + task.completion_tokens + 1
        no_room = f"leave no room for a document of {table.name} in the window of {window} tokens"
        advice = "choose fewer, or a model that reads more"
        raise account.nothing(table.name, f"--max-new-tokens: {task.completion_tokens} {no_room}; {advice}")
    return questions


def _written(
    writer: Writer, questions: Questions, options: SummarizationOptions, journal: Journal, progress: Progress
) -> dict[str, Summary]:
    names = list(questions)
    left: Sequence[str] = journal.left(names)
    mine = len(journal.share(names))
    # The rest of an interrupted run has a seed of its own: the same numbers are not drawn twice.
    seed = (options.seed + len(journal.results) * writer.draws_together) % 2**32

    def summaries() -> Iterator[tuple[str, Json]]:
        prompts = {name: questions[name][0].ids for name in left}
        written = writer.write(prompts, options.changed(seed=seed)) if left else iter(())
        for done, (name, ids) in enumerate(written, mine - len(left) + 1):
            text = writer.tokenizer.decode(ids, skip_special_tokens=True).strip()
            ended = writer.tokenizer.eos_token_id in ids
            yield name, Summary(prediction=text, tokens=len(ids), ended=ended, seed=seed).model_dump()
            progress(done, mine)

    progress(mine - len(left), mine)
    written = journal.collect(names, summaries())
    return {name: Summary.model_validate(written[name]) for name in names}
