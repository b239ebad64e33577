"""Rows to prompts and completions in token ids: a template around columns, cut to fit, and what is left out."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from string import Formatter
from typing import Any, NamedTuple

from huggingface_hub.constants import HF_HUB_OFFLINE

from pi_lora.data.documents import NamedJson, looks_local
from pi_lora.data.sources import find_table
from pi_lora.data.tokens import in_batches
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data
from pi_lora.types import Json

# The paper's, to the letter (paper.tex, `fig:summ-format`), where "# .... Document goes here" stands for the document.
# That one newline divides lines, and that a space comes between `Summary:` and the summary, is our reading.
SUMMARIZE = """\
Read the following article and then summarize it.
{document}
Now summarize the above article.
Summary:"""
EMPTY, TOO_LONG = "empty rows left out", "rows too long for the window left out"

NO_EXAMPLE = "no row has text in every column and a prompt that fits the window; name others, or a longer window"

# The name of a row, its texts, its prompt, and the token ids of its completion.
Example = tuple[str, Json, "Prompt", list[int]]


class Task:
    """A prompt with `{column}` for columns of a row, and the column of the completion, as `data` of a recipe with
    examples names them. Raise DataError if the template is malformed.

    >>> task = Task(Data(source="x", template="German: {de} English:", completion="en"))
    >>> task.pieces, task.columns
    ([('German: ', 'de'), (' English:', None)], ['de', 'en'])
    >>> task.prompt({"de": "Haus", "en": "house"})
    'German: Haus English:'
    """

    def __init__(self, data: Data) -> None:
        self.completion = data.completion or data.summary or ""
        self.template = data.template or SUMMARIZE.replace("{document}", f"{{{data.document}}}")
        try:
            # The texts of the template, each with the column after it, or None.
            self.pieces = [(text, column) for text, column, *_ in Formatter().parse(self.template)]
        except ValueError as error:
            raise DataError(f"data.template: {error}; write {{column}} for a column, {{{{ }}}} for braces") from None
        self.prompt_columns = list(dict.fromkeys(column for _, column in self.pieces if column is not None))
        self.columns = list(dict.fromkeys([*self.prompt_columns, self.completion]))
        wanted = data.document or "column"
        if not self.prompt_columns or data.document not in (None, *self.prompt_columns):
            raise DataError(f"data.template: names no {{{wanted}}}; write {{{wanted}}} where the text of a row goes")

    def prompt(self, row: Json) -> str:
        """Return the prompt of a row."""
        return "".join(text + row.get(column or "", "") for text, column in self.pieces)


class Prompt(NamedTuple):
    """A prompt in token ids with the first `kept` of `document_tokens`; `fits` unless all of a document had to go."""

    ids: list[int]
    document_tokens: int
    kept: int
    fits: bool


class Prompter:
    """Encodes rows of a task for a model that reads `window` tokens. A prompt leaves room for `completion_tokens` and
    EOS; only the document is cut, never the text after it. Without `special_tokens`, special tokens are text.
    """

    def __init__(self, data: Data, tokenizer: Any, window: int) -> None:
        self.data, self.task, self.eos = data, Task(data), tokenizer.eos_token_id
        self.longest = window - data.completion_tokens - 1
        self.tokenizer = partial(tokenizer, split_special_tokens=not data.special_tokens, verbose=False)
        special = [token for token in tokenizer.all_special_tokens if token in self.task.template]
        if special and not data.special_tokens:
            raise DataError(
                f"data.template: {special[0]} is a special token, and would be read as text; "
                "set data.special_tokens: true, which reads those in the rows as well, or leave it out"
            )

    def examples(self, rows: Iterable[NamedJson], counts: Counter[str], limit: int | None = None) -> Iterator[Example]:
        """Yield rows with prompts that fit, and count the others: those with an empty column, which `limit` does
        not count, and those too long.
        """

        def has_text(named: NamedJson) -> bool:
            is_full = all(text.strip() for text in named[1].values())
            counts[EMPTY] += not is_full
            return is_full

        for batch in in_batches(itertools.islice(filter(has_text, rows), limit)):
            texts = [row for _, row in batch]
            for named, prompt, completion in zip(batch, self.prompts(texts), self.completions(texts), strict=True):
                counts[TOO_LONG] += not prompt.fits
                if prompt.fits:
                    yield *named, prompt, completion

    def prompts(self, rows: Sequence[Json]) -> list[Prompt]:
        """Return the prompts of rows, as the tokenizer begins a text; many at a time are encoded in parallel."""
        column = self.data.document or ""
        plain = partial(self.tokenizer, add_special_tokens=False, return_offsets_mapping=True)
        documents = plain([row.get(column, "") for row in rows])["offset_mapping"]
        kept = [min(len(document), self.data.document_tokens, max(0, self.longest)) for document in documents]

        def cut(index: int) -> Json:
            """Return a row with the first tokens of its document."""
            row, document, tokens = rows[index], documents[index], kept[index]
            end = document[tokens - 1][1] if tokens else 0
            return row if tokens == len(document) else {**row, column: row[column][:end]}

        prompts = []
        for index, ids in enumerate(self._framed(list(map(cut, range(len(rows)))))):
            # Cut again by the tokens of the text around the document. Tokens may differ where the cut is.
            while len(ids) > self.longest and kept[index]:
                kept[index] = max(0, kept[index] - (len(ids) - self.longest))
                [ids] = self._framed([cut(index)])
            tokens, short_enough = len(documents[index]), len(ids) <= self.longest
            prompts.append(Prompt(ids, tokens, kept[index], short_enough and (kept[index] > 0 or not tokens)))
        return prompts

    def completions(self, rows: Sequence[Json]) -> list[list[int]]:
        """Return what follows the prompts, after a space if they end in none: cut to `completion_tokens`, and EOS.
        It is tokenized after the last words of the prompt, since tokenizers treat the start of a text differently.
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
            completions.append([*own[: self.data.completion_tokens], self.eos])
        return completions

    def _framed(self, rows: Sequence[Json]) -> list[list[int]]:
        """Encode with the BOS of the tokenizer, but without the EOS that some add."""
        encoded = self.tokenizer([self.task.prompt(row) for row in rows])["input_ids"]
        return [ids[:-1] if ids[-1:] == [self.eos] else ids for ids in encoded]


def data_problems(data: Data, ask_hub: bool = False) -> list[str]:
    """Return what is wrong with the template and with first rows of the sources, a line each; those of the hub are
    streamed if `ask_hub`.
    """
    try:
        columns = Task(data).columns if data.has_examples else []
    except DataError as problem:
        return [str(problem)]
    problems = []
    for source in data.source:
        if not ask_hub and not looks_local(source.name):
            continue
        try:
            # Without a network, `datasets` reads what it downloaded earlier, and streams nothing.
            table = find_table(source if HF_HUB_OFFLINE else source.changed(streaming=True))
            read = columns or [source.column] * source.has_chats
            next(table.read(read, None) if read else table.documents(), None)
        except DataError as problem:
            problems.append(str(problem))
    return [f"data.source: {problem}" for problem in problems]
