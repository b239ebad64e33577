"""Rows to prompts and completions in token ids: a template around columns, cut to fit, and what is left out."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from string import Formatter
from typing import Any, NamedTuple

from pi_lora.data.chats import chat_prompt_ids
from pi_lora.data.documents import NamedJson
from pi_lora.data.sources import Table, hash_to_unit
from pi_lora.data.tokens import (
    Labelled,
    check_offsets,
    in_batches,
    prompt_ids,
    special_tokens_of,
    strip_eos,
)
from pi_lora.errors import DataError
from pi_lora.recipe.data import Data
from pi_lora.types import Json

# The prompt of the paper, to the letter (paper.tex, `fig:summ-format`). There, "# .... Document goes here" stands for
# the document. One newline between lines, and a space between `Summary:` and the summary, are our reading.
SUMMARIZE = """\
Read the following article and then summarize it.
{document}
Now summarize the above article.
Summary:"""
EMPTY = "empty rows left out"
TOO_LONG = "rows too long for the window left out"

NO_EXAMPLE = "no row has a prompt that fits the window and a completion; name others, or a longer window"

# The name of a row, its texts, its prompt, and the token ids of its completion.
Example = tuple[str, Json, "Prompt", list[int]]
# Where the tokens of a text begin and end, in characters.
Offsets = Sequence[tuple[int, int]]


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
        self.document = data.document
        self.completion = data.completion or data.summary or ""
        document = f"{{{data.document}}}"
        self.template = data.template or SUMMARIZE.replace("{document}", document)
        try:
            parsed = list(Formatter().parse(self.template))
        except ValueError as error:
            raise DataError(f"data.template: {error}; write {{column}} for a column, {{{{ }}}} for braces") from None
        # Pairs of a text of the template and the column that follows the text, or None.
        self.pieces = [(text, column) for text, column, *_ in parsed]
        prompt_columns = [column for _, column in self.pieces if column is not None]
        self.prompt_columns = list(dict.fromkeys(prompt_columns))
        self.columns = list(dict.fromkeys([*self.prompt_columns, self.completion]))
        wanted = data.document or "column"
        if not self.prompt_columns or data.document not in (None, *self.prompt_columns):
            raise DataError(f"data.template: names no {{{wanted}}}; write {{{wanted}}} where the text of a row goes")

    @property
    def held_out_by(self) -> list[str]:
        """The columns by which rows are held out: the document, so that all rows with one document are held out
        together, or else the columns of the prompt.
        """
        return [self.document] if self.document else self.prompt_columns

    def prompt(self, row: Json) -> str:
        """Return the prompt of a row."""
        return "".join(text + row.get(column or "", "") for text, column in self.pieces)


class Prompt(NamedTuple):
    """A prompt in token ids with the first `kept` of `document_tokens`. The prompt `fits` if it is short enough and
    keeps some of the document.
    """

    ids: list[int]
    document_tokens: int
    kept: int
    fits: bool


class Prompter:
    """Encodes rows of a task for a model that reads `window` tokens. A prompt leaves room for `completion_tokens` and
    EOS; only the document is cut, never the text after it. Without `special_tokens`, special tokens are text. With
    `chat`, a prompt is the turn of a user in the chat template.
    """

    def __init__(self, data: Data, tokenizer: Any, window: int, *, chat: bool = False) -> None:
        self.data = data
        self.document = data.document or ""
        self.task = Task(data)
        self.eos = tokenizer.eos_token_id
        check_offsets(tokenizer)
        self.longest = window - data.completion_tokens - 1
        self.tokenizer = partial(tokenizer, split_special_tokens=not data.special_tokens, verbose=False)
        self.prompt_ids = partial(prompt_ids, tokenizer, special_tokens=data.special_tokens)
        if chat:
            self.prompt_ids = partial(chat_prompt_ids, tokenizer)
        special = [token for token in special_tokens_of(tokenizer) if token in self.task.template]
        if special and not data.special_tokens:
            raise DataError(
                f"data.template: {special[0]} is a special token, and would be read as text; "
                "remove it, or set data.special_tokens: true, which also applies to the rows"
            )

    def examples(
        self, table: Table, counts: Counter[str], limit: int | None = None, *, held_out: bool = False
    ) -> Iterator[Example]:
        """Yield at most `limit` rows of a table that train, or that are `held_out`, and whose prompts fit. Rows
        without text and rows too long are counted in `counts`; only the latter count for `limit`.
        """
        # Zeros fix the order in which the counts are reported.
        counts.update({EMPTY: 0, TOO_LONG: 0})
        rows = self._part(table, held_out)
        full_rows = itertools.islice(self._rows_with_text(rows, counts), limit)
        for batch in in_batches(full_rows):
            texts = [row for _, row in batch]
            prompts = self.prompts(texts)
            completions = self.completions(texts)
            for (name, row), prompt, completion in zip(batch, prompts, completions, strict=True):
                if prompt.fits:
                    yield name, row, prompt, completion
                else:
                    counts[TOO_LONG] += 1

    def rows(
        self, table: Table, counts: Counter[str], seed: int | None = None, *, held_out: bool = False
    ) -> Iterator[Labelled]:
        """Yield the examples in the order of the table; `seed` is unused, since a training shuffles examples. The loss
        counts completions, or prompts too. Count the examples that are cut or left out.
        """
        prompt_counts = self.data.loss == "all"
        for name, _, prompt, completion in self.examples(table, counts, held_out=held_out):
            document_is_cut = prompt.kept < prompt.document_tokens
            completion_is_cut = len(completion) > self.data.completion_tokens
            # Counts of zero fix the order in which the counts are reported.
            counts["documents cut"] += int(document_is_cut)
            counts["completions cut"] += int(completion_is_cut)
            loss_mask = [prompt_counts] * len(prompt.ids) + [True] * len(completion)
            yield Labelled(prompt.ids + completion, loss_mask, name)

    def _part(self, table: Table, held_out: bool) -> Iterator[NamedJson]:
        """Yield the rows of a table that train, or that are `held_out` by a digest of the columns that decide."""
        share = table.source.hold_out
        for name, row in table.read(self.task.columns, None):
            text = "\n".join(row[column] for column in self.task.held_out_by)
            if share is None or (hash_to_unit(text) < share) == held_out:
                yield name, row

    def _rows_with_text(self, rows: Iterable[NamedJson], counts: Counter[str]) -> Iterator[NamedJson]:
        """Yield the rows with a completion, a document if there is one, and text in some column of the prompt: the
        `input` of Alpaca may be empty.
        """
        needed = [self.task.completion, self.document or self.task.completion]
        for name, row in rows:
            prompt_has_text = any(row[column].strip() for column in self.task.prompt_columns)
            if prompt_has_text and all(row[column].strip() for column in needed):
                yield name, row
            else:
                counts[EMPTY] += 1

    def prompts(self, rows: Sequence[Json]) -> list[Prompt]:
        """Return the prompts of rows, with the BOS of the tokenizer. The documents are encoded in parallel."""
        documents = [row.get(self.document, "") for row in rows]
        encoded = self.tokenizer(documents, add_special_tokens=False, return_offsets_mapping=True)
        return list(map(self._prompt, rows, encoded["offset_mapping"]))

    def _prompt(self, row: Json, offsets: Offsets) -> Prompt:
        """Return the prompt of a row with the first `document_tokens` of the document, or with fewer until the prompt
        fits.
        """
        room = max(0, self.longest)
        kept = min(len(offsets), self.data.document_tokens, room)
        ids = self._framed(row, offsets, kept)
        # The text around the document takes tokens too, and tokens may differ where the cut is.
        while len(ids) > self.longest and kept:
            excess = len(ids) - self.longest
            kept = max(0, kept - excess)
            ids = self._framed(row, offsets, kept)
        keeps_text = kept > 0 or not offsets
        fits = len(ids) <= self.longest and keeps_text
        return Prompt(ids, document_tokens=len(offsets), kept=kept, fits=fits)

    def _framed(self, row: Json, offsets: Offsets, kept: int) -> list[int]:
        """Encode the prompt of a row with the first `kept` tokens of the document: with the BOS of the tokenizer, but
        without the EOS that some add.
        """
        if kept < len(offsets):
            _, end = offsets[kept - 1] if kept else (0, 0)
            row = {**row, self.document: row[self.document][:end]}
        ids: list[int] = self.prompt_ids(self.task.prompt(row))
        return ids

    def completions(self, rows: Sequence[Json]) -> list[list[int]]:
        """Return the token ids of the completions of rows, cut to `completion_tokens`, with EOS. A space comes before a
        completion unless the prompt ends with one. A completion is tokenized after the last words of the prompt, since
        tokenizers treat the start of a text differently.
        """
        last_text, column = self.task.pieces[-1]
        tail = last_text[-20:] if column is None else ""
        space = "" if tail[-1:].isspace() else " "
        texts = [space + row[self.task.completion].strip() for row in rows]
        plain = partial(self.tokenizer, add_special_tokens=False)
        texts_after_tail = [tail + text for text in texts]
        tail_ids, *sequences = plain([tail, *texts_after_tail])["input_ids"]
        completions = []
        for text, ids in zip(texts, sequences, strict=True):
            completion = ids[len(tail_ids) :]
            if ids[: len(tail_ids)] != tail_ids:
                # The prompt and the text merge into one token: the text is tokenized by itself.
                completion = plain(text)["input_ids"]
            completion = strip_eos(completion, self.eos)
            first_tokens = completion[: self.data.completion_tokens]
            completions.append([*first_tokens, self.eos])
        return completions
