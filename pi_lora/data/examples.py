"""Rows to prompts and completions in token ids: a template around columns, cut to fit, and what is left out."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from string import Formatter
from typing import Any, NamedTuple

from huggingface_hub import constants

from pi_lora.data.chats import ChatTemplate
from pi_lora.data.documents import COMPRESSION, NamedJson, looks_local
from pi_lora.data.sources import BUILTIN_TEXTS, COUNTED_ROWS, Table, find_table, format_counts, hash_to_unit, streamed
from pi_lora.data.tokens import (
    check_offsets,
    in_batches,
    prompt_ids,
    special_tokens_of,
    strip_eos,
    tokenized,
)
from pi_lora.errors import DataError
from pi_lora.recipe.data import Data, Source
from pi_lora.recipe.schema import Recipe
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
    EOS; only the document is cut, never the text after it. Without `special_tokens`, special tokens are text.
    """

    def __init__(self, data: Data, tokenizer: Any, window: int) -> None:
        self.data = data
        self.document = data.document or ""
        self.task = Task(data)
        self.eos = tokenizer.eos_token_id
        check_offsets(tokenizer)
        self.longest = window - data.completion_tokens - 1
        self.tokenizer = partial(tokenizer, split_special_tokens=not data.special_tokens, verbose=False)
        self.prompt_ids = partial(prompt_ids, tokenizer, special_tokens=data.special_tokens)
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
        rows = self.rows(table, held_out)
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

    def rows(self, table: Table, held_out: bool) -> Iterator[NamedJson]:
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


def check_first_rows(table: Table, data: Data, tokenizer: Any, window: int, *, held_out: bool) -> None:
    """Raise DataError if all examples or chats in the first rows of a table would be left out of a training, or of a
    measurement of `held_out` ones. Usually one row, or one batch, is encoded. Usable rows may follow in a
    longer table.
    """
    counts = Counter[str]()
    num_rows = 0

    def read(columns: Sequence[str], _: int | None) -> Iterator[NamedJson]:
        nonlocal num_rows
        for row in itertools.islice(table.read(columns, None), COUNTED_ROWS):
            num_rows += 1
            yield row

    usable: Iterator[Any]
    if data.has_examples:
        first_rows = replace(table, read=read)
        usable = Prompter(data, tokenizer, window).examples(first_rows, counts, held_out=held_out)
    else:
        column = table.source.column
        template = ChatTemplate(tokenizer, train_on_all=data.loss == "all", special_tokens=data.special_tokens)
        usable = template.chats(read([column], None), column, window, counts)
    if next(usable, None) is None and counts.total() and num_rows < COUNTED_ROWS:
        reasons = ", ".join(format_counts(counts))
        raise DataError(f"{table.source.name}: none of the {num_rows} rows can be used ({reasons}); name others")


def data_problems(
    data: Data,
    ask_hub: bool = False,
    *,
    key: str = "data.source",
    held_out: bool = False,
    tokenizer: Any = None,
    window: int = 0,
) -> list[str]:
    """Return the problems of the template and of the first rows of the sources, one a line; `key` names the sources in
    a recipe. Rows are `held_out` ones if texts are to be measured. With the `tokenizer` of a model, examples and chats
    are encoded for its `window`. Sources on the hub are streamed if `ask_hub`, read from the cache without the hub, and
    skipped otherwise.
    """
    columns: Sequence[str] = ()
    problems: list[str] = []
    try:
        if data.has_examples:
            columns = Task(data).columns
        if tokenizer is not None and data.has_examples:
            Prompter(data, tokenizer, window)
        elif tokenizer is not None and data.has_chats:
            ChatTemplate(tokenizer)
    except DataError as problem:
        line = str(problem).replace("data.source", key, 1)
        problems.append(line if line.startswith(key) or key == "data.source" else f"{key}: {line}")
        if data.has_examples and not columns:
            return problems
        tokenizer = None
    for source in data.source:
        if not (ask_hub or constants.HF_HUB_OFFLINE or looks_local(source.name)):
            continue
        try:
            table = find_table(streamed(source))
            if columns or source.has_chats:
                rows = table.read(columns or [source.column], None)
                if next(rows, None) is None:
                    raise DataError(f"{source.name}: holds no rows; name a source with rows")
                if tokenizer is not None:
                    check_first_rows(table, data, tokenizer, window, held_out=held_out)
            else:
                next(table.documents(held_out=held_out), None)
        except DataError as problem:
            problems.append(f"{key}: {problem}")
    return problems


def too_short_for(source: Source, tokens: int, tokenizer: Any = None) -> str | None:
    """Return the problem that no held-out document of a local source has so many tokens, as a window needs.

    Without a tokenizer, every byte counts as a token, and BOS is one more. Return None if a document has them, or if
    there are too many documents.
    """
    if not looks_local(source.name) or source.name in BUILTIN_TEXTS:
        return None
    most_bytes = 0
    most_tokens = 0
    documents = itertools.islice(find_table(source).documents(held_out=True), COUNTED_ROWS)
    for number, document in enumerate(documents, 1):
        if number == COUNTED_ROWS:
            return None
        num_bytes = len(document.text.encode(errors="surrogateescape"))
        most_bytes = max(most_bytes, num_bytes)
        if num_bytes + 1 < tokens:
            continue
        if tokenizer is None:
            return None
        [ids] = tokenized(tokenizer, [document.text], enough=tokens)
        num_tokens = len(strip_eos(ids, tokenizer.eos_token_id))
        if num_tokens >= tokens:
            return None
        most_tokens = max(most_tokens, num_tokens)
    kind = "held-out document" if source.hold_out else "document"
    longest = f"{most_tokens:,} tokens" if most_tokens else f"{most_bytes:,} bytes"
    return f"{source.name}: the longest {kind} has {longest}, and {tokens:,} tokens are needed"


def amount_problems(recipe: Recipe, original: int) -> list[str]:
    """Return the sources whose text is too short for their share of a training even if every byte is a token: one line
    each; and PoSE chunks that a sequence cannot hold. Only text files are known without reading them; `original` is the
    window L in tokens.
    """
    data = recipe.data
    if data.has_examples:
        return []
    length = data.tokens_per_sequence(original, recipe.context.target)
    if data.positions == "pose" and data.chunks > length:
        return [f"data.chunks: {data.chunks} are more than the {length} tokens of a PoSE sequence; lower them"]
    training = recipe.training
    sequences = training.steps * training.global_batch_size * (1 - data.keep_short)
    weights = sum(source.weight for source in data.source)
    problems = []
    for source in data.source:
        if not looks_local(source.name) or source.name in BUILTIN_TEXTS:
            continue
        table = find_table(source)
        if not table.texts or any(COMPRESSION.search(name) for name in table.texts):
            continue
        training_bytes = table.size * (1 - (source.hold_out or 0))
        # Every text begins with BOS.
        most_tokens = (training_bytes + len(table.texts)) * data.epochs
        needed = int(sequences * source.weight / weights)
        if most_tokens < needed * length:
            held = most_tokens / length + 1
            problems.append(
                f"data.source: {source.name}: holds fewer than {held:,.0f} sequences of {length:,} tokens in "
                f"data.epochs: {data.epochs}; {needed:,} are needed for its share; add text, raise data.epochs, or "
                "lower training.steps"
            )
    return problems
