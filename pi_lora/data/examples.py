"""Rows to prompts and completions in token ids: a template around columns, cut to fit, and what is left out."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from string import Formatter
from typing import Any

from datasets import Dataset, Features
from huggingface_hub.constants import HF_HUB_OFFLINE
from pydantic import BaseModel

from pi_lora.data.cache import FLAGS, INTEGERS, Row, cached
from pi_lora.data.sources import NamedRow, characters, find_corpus, find_table
from pi_lora.data.tokens import in_batches, tokenizer_identity
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data
from pi_lora.types import Progress, silent

# The paper's, to the letter (paper.tex, `fig:summ-format`), where "# .... Document goes here" stands for the document.
# That one newline divides lines, and that a space comes between `Summary:` and the summary, is our reading.
SUMMARIZE = """\
Read the following article and then summarize it.
{document}
Now summarize the above article.
Summary:"""
# Raise it with every change to how examples are made.
FORMAT = 6

Texts = Mapping[str, str]


@dataclass(frozen=True)
class Task:
    """A prompt with `{column}` for columns of a row, and the column of the completion.

    `document` is the column that is cut, to its first `document_tokens` or to what fits; `completion_tokens` is the
    longest that is learned and written. With `special_tokens`, special tokens in rows and template keep their meaning;
    else they are text.
    """

    template: str
    completion: str
    document: str | None
    document_tokens: int
    completion_tokens: int
    special_tokens: bool = False

    @classmethod
    def of(cls, data: Data) -> "Task":
        """Return the task of a recipe's `data`, which has examples; raise DataError if its template is malformed."""
        template = SUMMARIZE.replace("{document}", f"{{{data.document}}}") if data.template is None else data.template
        completion = data.completion or data.summary or ""
        limits = data.document_tokens, data.completion_tokens
        task = cls(template, completion, data.document, *limits, data.special_tokens)
        try:
            columns = task.prompt_columns
        except ValueError as error:
            raise DataError(f"data.template: {error}; write {{column}} for a column, {{{{ }}}} for braces") from None
        wanted = data.document or "column"
        if not columns or "" in columns or data.document not in (None, *columns):
            raise DataError(f"data.template: names no {{{wanted}}}; write {{{wanted}}} where the text of a row goes")
        return task

    @property
    def pieces(self) -> list[tuple[str, str | None]]:
        """The texts of the template, each with the column after it, or None.

        >>> Task("German: {german} English:", "english", None, 9, 9).pieces
        [('German: ', 'german'), (' English:', None)]
        """
        return [(text, column) for text, column, *_ in Formatter().parse(self.template)]

    @property
    def prompt_columns(self) -> list[str]:
        """The columns of the prompt, in order."""
        return list(dict.fromkeys(column for _, column in self.pieces if column is not None))

    @property
    def columns(self) -> list[str]:
        """All columns that a row must have, those of the prompt first."""
        return list(dict.fromkeys([*self.prompt_columns, self.completion]))

    def prompt(self, row: Texts) -> str:
        """Return the prompt of a row.

        >>> Task("Q: {q} A:", "a", None, 9, 9).prompt({"q": "Why?"})
        'Q: Why? A:'
        """
        return "".join(text + (row[column] if column is not None else "") for text, column in self.pieces)


@dataclass(frozen=True)
class Prompt:
    """A prompt in token ids with the first `kept` of `document_tokens`; `fits`: not all of a document had to go."""

    ids: list[int]
    document_tokens: int = 0
    kept: int = 0
    fits: bool = True


class Prompter:
    """Encodes rows of a task for a model that reads `window` tokens. A prompt leaves room for `completion_tokens` and
    EOS; only the document is cut, never the text after it.
    """

    def __init__(self, task: Task, tokenizer: Any, window: int) -> None:
        self.task, self.longest = task, window - task.completion_tokens - 1
        self.tokenizer = partial(tokenizer, split_special_tokens=not task.special_tokens, verbose=False)
        self.eos = tokenizer.eos_token_id
        special = [token for token in tokenizer.all_special_tokens if token in task.template]
        if special and not task.special_tokens:
            how = "set data.special_tokens: true, which reads those in the rows as well, or leave it out"
            raise DataError(f"data.template: {special[0]} is a special token, and would be read as text; {how}")

    def prompts(self, rows: Sequence[Texts]) -> list[Prompt]:
        """Return the prompts of rows, as the tokenizer begins a text; many at a time are encoded in parallel."""
        column = self.task.document
        if column is None:
            return [Prompt(ids, fits=len(ids) <= self.longest) for ids in self._framed(rows)]
        texts = [row[column] for row in rows]
        documents = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        sizes = list(map(len, documents["input_ids"]))

        def cut(index: int, tokens: int) -> Texts:
            """Return a row with the first `tokens` of its document."""
            end = documents["offset_mapping"][index][tokens - 1][1] if tokens else 0
            return {**rows[index], column: texts[index] if tokens == sizes[index] else texts[index][:end]}

        kept = [min(size, self.task.document_tokens, max(0, self.longest)) for size in sizes]
        prompts = []
        for index, ids in enumerate(self._framed([cut(*pair) for pair in enumerate(kept)])):
            # Cut again by what the text around the document takes. Tokens may differ where the cut is.
            while len(ids) > self.longest and kept[index]:
                kept[index] = max(0, kept[index] - (len(ids) - self.longest))
                [ids] = self._framed([cut(index, kept[index])])
            fits = len(ids) <= self.longest and (kept[index] > 0 or not sizes[index])
            prompts.append(Prompt(ids, sizes[index], kept[index], fits))
        return prompts

    def completions(self, rows: Sequence[Texts]) -> list[list[int]]:
        """Return what follows the prompts, after a space if they end in none: cut to `completion_tokens`, and EOS.
        It is tokenized after the prompt's last words, since tokenizers treat the start of a text differently.
        """
        last, column = self.task.pieces[-1]
        tail = last[-20:] if column is None else ""
        texts = [("" if tail[-1:].isspace() else " ") + row[self.task.completion].strip() for row in rows]
        plain = partial(self.tokenizer, add_special_tokens=False)
        before, *after = plain([tail, *(tail + text for text in texts)])["input_ids"]
        completions = []
        for text, ids in zip(texts, after, strict=True):
            # Where the two merged into one token, the text is tokenized by itself.
            own = ids[len(before) :] if ids[: len(before)] == before else plain(text)["input_ids"]
            completions.append([*own[: self.task.completion_tokens], self.eos])
        return completions

    def _framed(self, rows: Sequence[Texts]) -> list[list[int]]:
        """Encode with the tokenizer's own BOS, but without the EOS that some add."""
        encoded = self.tokenizer([self.task.prompt(row) for row in rows])["input_ids"]
        return [ids[:-1] if ids[-1:] == [self.eos] else ids for ids in encoded]


class Account(BaseModel):
    """What became of the rows: the tokens of each example, how many examples were cut, and which rows are left out."""

    tokens: list[int] = []
    documents_cut: int = 0
    completions_cut: int = 0
    empty: list[str] = []
    too_long: list[str] = []

    @property
    def left_out(self) -> list[str]:
        """A line for each reason, with the number of rows and the name of the first."""
        reasons = {"empty": self.empty, "too long for the window": self.too_long}
        return [f"{len(rows):,} rows left out, {why}, first {rows[0]}" for why, rows in reasons.items() if rows]

    def nothing(self, source: str, too_long: str) -> DataError:
        """Return why `source` gave no example; `too_long` says what leaves no room for its prompts."""
        return DataError(too_long if self.too_long else f"{source}: no row has text in every column; name others")


def prompted(
    rows: Iterable[NamedRow], prompter: Prompter, account: Account, limit: int | None = None
) -> Iterator[list[tuple[str, Texts, Prompt]]]:
    """Yield rows by the batch, each with its name and a prompt that fits. The others go to the account: those with an
    empty column, beside which `limit` are read, and those too long.
    """

    def has_text(named: NamedRow) -> bool:
        where, row = named
        if all(text.strip() for text in row.values()):
            return True
        account.empty.append(where)
        return False

    for batch in in_batches(itertools.islice(filter(has_text, rows), limit), characters):
        prompts = prompter.prompts([row for _, row in batch])
        rows_with_prompts = [(*named, prompt) for named, prompt in zip(batch, prompts, strict=True)]
        account.too_long += [where for where, _, prompt in rows_with_prompts if not prompt.fits]
        yield [row for row in rows_with_prompts if row[-1].fits]


def training_examples(data: Data, tokenizer: Any, window: int, progress: Progress = silent) -> tuple[Dataset, Account]:
    """Return the examples of a recipe for a model that reads `window` tokens, rows of `input_ids` with those that are
    `learned`, and the account of them; both from the cache if they are there. Raise DataError if a source cannot be
    read or lacks a column, every row is empty or too long, or the tokenizer has no EOS to end a completion with.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("model.name: its tokenizer has no EOS token, without which no completion ends; give it one")
    task, account, tables = Task.of(data), Account(), list(map(find_table, data.source))
    made_from = {
        "examples": FORMAT,
        "sources": [
            {**source.model_dump(), **table.identity()} for source, table in zip(data.source, tables, strict=True)
        ],
        "task": asdict(task),
        "loss": data.loss,
        "tokenizer": tokenizer_identity(tokenizer),
        "window": window,
    }

    def rows() -> Iterator[Row]:
        prompter = Prompter(task, tokenizer, window)
        named = (row for table in tables for row in table.read(task.columns, None))
        for batch in prompted(named, prompter, account):
            completions = prompter.completions([row for _, row, _ in batch])
            for (_, _, prompt), completion in zip(batch, completions, strict=True):
                account.tokens.append(len(prompt.ids) + len(completion))
                account.documents_cut += prompt.kept < prompt.document_tokens
                account.completions_cut += len(completion) > task.completion_tokens
                learned = [data.loss == "all"] * len(prompt.ids) + [True] * len(completion)
                yield {"input_ids": prompt.ids + completion, "learned": learned}
            progress(len(account.tokens) + len(account.too_long), 0, f"{len(account.tokens):,} examples")
        if not account.tokens:
            cause = f"data.completion_tokens: {data.completion_tokens} leave no room for a prompt"
            raise account.nothing("data.source", f"{cause}; lower it, or choose a longer context.target")

    columns = Features({"input_ids": INTEGERS, "learned": FLAGS})
    examples, noted = cached(made_from, columns, rows, account.model_dump)
    return examples, Account(**noted)


def data_problems(data: Data, ask_hub: bool = False) -> list[str]:
    """Return what is wrong with the template and with first rows of the sources, a line each; those of the hub are
    streamed if `ask_hub`.
    """
    try:
        columns = Task.of(data).columns if data.has_examples else []
    except DataError as problem:
        return [str(problem)]
    problems = []
    for source in data.source:
        try:
            # Without a network, `datasets` reads what it downloaded earlier, and streams nothing.
            first = source if HF_HUB_OFFLINE else source.model_copy(update={"streaming": True})
            table = find_table(first) if columns else find_corpus(first)
            if ask_hub or table.size is not None:
                next(table.read(columns, None) if columns else table.documents(), None)
        except DataError as problem:
            problems.append(str(problem))
    return [f"data.source: {problem}" for problem in problems]
