"""A recipe's rows to training examples: prompts and completions in token ids, with an account of what is left out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from datasets import Dataset

from pi_lora.data.cache import Layout, cached, notes_on
from pi_lora.data.packing import tokenizer_identity
from pi_lora.data.prompts import Prompter, Task
from pi_lora.data.tables import LocalTable, NamedRow, Table, find_table
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Source
from pi_lora.types import Progress, silent

# Of how examples are made: raise it with every change that makes other ones.
FORMAT = 1
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
            f"{len(names):,} {reason}: {', '.join(names[:SHOWN])}" + (", ..." if len(names) > SHOWN else "")
            for reason, names in (
                ("rows left out, empty", self.empty),
                ("rows left out, too long for the window", self.too_long),
            )
            if names
        ]


@dataclass(frozen=True)
class Examples:
    """Examples of a recipe: rows of `prompt_ids` and `completion_ids`, and the account of them."""

    dataset: Dataset
    account: Account


def training_examples(data: Data, tokenizer: Any, window: int, progress: Progress | None = None) -> Examples:
    """The examples of a recipe's sources, for a model that reads `window` tokens; made once, then read from the cache.

    Raises:
        DataError: a source cannot be read or lacks a column, every row is empty or too long, or the tokenizer has no
            EOS to end a completion with.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("model.name: its tokenizer has no EOS token, without which no completion ends; give it one")
    task = Task.of(data)
    tables = [find_table(source) for source in data.source]
    made_from = {
        "examples": FORMAT,
        "sources": [
            {**source.model_dump(), **table.identity()} for source, table in zip(data.source, tables, strict=True)
        ],
        "task": asdict(task),
        "tokenizer": tokenizer_identity(tokenizer),
        "window": window,
    }
    tell: Progress = progress or (silent)
    account = Account()

    def rows() -> Iterator[Mapping[str, list[int]]]:
        yield from _encoded(tables, Prompter(task, tokenizer, window), account, tell)
        if not account.examples:
            raise _nothing(data, account)

    kind = "uint16" if len(tokenizer) <= 2**16 else "int32"
    layout = Layout({"prompt_ids": kind, "completion_ids": kind})
    dataset = cached(
        made_from, layout, rows, lambda: tell(0, 0, "waiting for another process"), lambda: asdict(account)
    )
    return Examples(dataset, Account(**notes_on(made_from)))


def example_problems(data: Data) -> list[str]:
    """What is wrong with the template and the columns as far as first rows tell, a line each; the hub is not asked."""
    try:
        columns = Task.of(data).columns
    except DataError as problem:
        return [str(problem)]
    return [f"data.source: {problem}" for source in data.source for problem in _problems(source, columns)]


def _problems(source: Source, columns: Sequence[str]) -> Iterator[str]:
    try:
        table = find_table(source)
        if isinstance(table, LocalTable):
            next(table.rows(columns), None)
    except DataError as problem:
        yield str(problem)


def filled(rows: Iterable[NamedRow], account: Account) -> Iterator[NamedRow]:
    """The rows that hold text in every column; the others go to the account."""
    for where, row in rows:
        if all(text.strip() for text in row.values()):
            yield where, row
        else:
            account.empty.append(where)


def _encoded(
    tables: Sequence[Table], prompter: Prompter, account: Account, tell: Progress
) -> Iterator[Mapping[str, list[int]]]:
    columns = prompter.task.columns
    rows = (row for table in tables for row in filled(table.rows(columns), account))
    done = 0
    for batch in in_batches(rows):
        texts = [row for _, row in batch]
        for (where, _), prompt, completion in zip(
            batch, prompter.prompts(texts), prompter.completions(texts), strict=True
        ):
            if not prompt.fits:
                account.too_long.append(where)
                continue
            account.examples += 1
            account.documents_cut += prompt.kept < prompt.document_tokens
            account.completions_cut += len(completion) > prompter.task.completion_tokens
            yield {"prompt_ids": prompt.ids, "completion_ids": completion}
        done += len(batch)
        tell(done, 0, f"{account.examples:,} examples")


def in_batches(rows: Iterable[NamedRow]) -> Iterator[list[NamedRow]]:
    """Rows of about as much text as is tokenized at once."""
    batch: list[NamedRow] = []
    size = 0
    for where, row in rows:
        batch.append((where, row))
        size += sum(map(len, row.values()))
        if size >= CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _nothing(data: Data, account: Account) -> DataError:
    names = ", ".join(source.name for source in data.source)
    if account.too_long:
        return DataError(
            f"data.completion_tokens: {data.completion_tokens} leave no room for a prompt of {names} in the window "
            f"({len(account.too_long):,} rows are too long); lower it, or choose a longer context.target"
        )
    if account.empty:
        return DataError(f"data.source: {names}: a column is empty in all of {len(account.empty):,} rows; name others")
    return DataError(f"data.source: {names}: holds no rows; name a source that does")
