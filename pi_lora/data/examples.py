"""Training examples from rows: prompts and completions in token ids, and an account of the rows that are left out."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from datasets import Dataset

from pi_lora.data import packing
from pi_lora.data.cache import Row, cached, columns_of
from pi_lora.data.prompts import Prompter, Task
from pi_lora.data.tables import LocalFiles, NamedRow, find_table
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data
from pi_lora.types import Progress, silent

# Raise it with every change to how examples are made.
FORMAT = 2
# How much text is tokenized at once, by several threads.
CHARACTERS_AT_ONCE = 2_000_000
SHOWN = 5


@dataclass
class Account:
    """What became of the rows: how many are examples, how many of those were cut, and which are left out and why."""

    examples: int = 0
    documents_cut: int = 0
    completions_cut: int = 0
    empty: list[str] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)

    @property
    def left_out(self) -> list[str]:
        """A line for each reason, with the number of rows and the names of the first."""
        return [
            f"{len(names):,} rows left out, {reason}: {', '.join([*names[:SHOWN], *['...'] * (len(names) > SHOWN)])}"
            for reason, names in {"empty": self.empty, "too long for the window": self.too_long}.items()
            if names
        ]


def training_examples(data: Data, tokenizer: Any, window: int, progress: Progress = silent) -> tuple[Dataset, Account]:
    """Make the examples of a recipe for a model that reads `window` tokens, or read them from the cache.

    Returns rows of `prompt_ids` and `completion_ids`, and the account of them. Raises DataError if a source cannot be
    read or lacks a column, every row is empty or too long, or the tokenizer has no EOS to end a completion with.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("model.name: its tokenizer has no EOS token, without which no completion ends; give it one")
    task, account = Task.of(data), Account()
    tables = [(source, find_table(source)) for source in data.source]
    made_from = {
        "examples": FORMAT,
        "sources": [{**source.model_dump(), **table.identity()} for source, table in tables],
        "task": asdict(task),
        "tokenizer": packing.tokenizer_identity(tokenizer),
        "window": window,
    }

    def rows() -> Iterator[Row]:
        prompter, done = Prompter(task, tokenizer, window), 0
        for batch in in_batches(filled((row for _, table in tables for row in table.rows(task.columns)), account)):
            texts = [row for _, row in batch]
            prompts, completions = prompter.prompts(texts), prompter.completions(texts)
            for (where, _), prompt, completion in zip(batch, prompts, completions, strict=True):
                if not prompt.fits:
                    account.too_long.append(where)
                    continue
                account.examples += 1
                account.documents_cut += prompt.kept < prompt.document_tokens
                account.completions_cut += len(completion) > task.completion_tokens
                yield {"prompt_ids": prompt.ids, "completion_ids": completion}
            done += len(batch)
            progress(done, 0, f"{account.examples:,} examples")
        if not account.examples:
            raise _no_examples(data, account)

    columns = columns_of(dict.fromkeys(("prompt_ids", "completion_ids"), packing.token_type(tokenizer)))
    waiting = "waiting for another process"
    found, noted = cached(made_from, columns, rows, lambda: progress(0, 0, waiting), lambda: asdict(account))
    return found, Account(**noted)


def example_problems(data: Data) -> list[str]:
    """Return what is wrong with the template and with first rows, a line each; the hub is not asked."""
    try:
        columns = Task.of(data).columns
    except DataError as problem:
        return [str(problem)]
    problems = []
    for source in data.source:
        try:
            table = find_table(source)
            if isinstance(table, LocalFiles):
                next(table.rows(columns), None)
        except DataError as problem:
            problems.append(f"data.source: {problem}")
    return problems


def filled(rows: Iterable[NamedRow], account: Account) -> Iterator[NamedRow]:
    """Yield the rows that hold text in every column; the others go to the account."""
    for where, row in rows:
        if all(text.strip() for text in row.values()):
            yield where, row
        else:
            account.empty.append(where)


def in_batches(rows: Iterable[NamedRow]) -> Iterator[list[NamedRow]]:
    """Yield rows of about as much text as is tokenized at once."""
    return packing.in_batches(rows, lambda row: sum(map(len, row[1].values())), CHARACTERS_AT_ONCE)


def _no_examples(data: Data, account: Account) -> DataError:
    names, empty, too_long = ", ".join(source.name for source in data.source), len(account.empty), len(account.too_long)
    if too_long:
        cause = f"data.completion_tokens: {data.completion_tokens} leave no room for a prompt of {names} in the window"
        return DataError(f"{cause} ({too_long:,} rows are too long); lower it, or choose a longer context.target")
    if empty:
        return DataError(f"data.source: {names}: a column is empty in all of {empty:,} rows; name others")
    return DataError(f"data.source: {names}: holds no rows; name a source that does")
