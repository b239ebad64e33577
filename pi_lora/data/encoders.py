"""Rows of a source to token ids: one encoder for each kind of row, text, chats, examples and recall documents."""

import itertools
import random
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pi_lora.data.chats import ChatTemplate
from pi_lora.data.examples import Prompter
from pi_lora.data.recall import recall_document
from pi_lora.data.sources import Table
from pi_lora.data.tokens import Labelled, Tokens, in_batches, tokenized
from pi_lora.recipe.data import RECALL, Data, Source

# The width of lines in characters, and the most lines of a recipe between facts: a stream may have no end.
LINE_WIDTH = 100
MAX_LINES = 300_000


class Encoder(Protocol):
    """Encodes the rows of a table."""

    def rows(
        self, table: Table, counts: Counter[str], seed: int | None = None, *, held_out: bool = False
    ) -> Iterator[Labelled]:
        """Yield the rows that train, or those `held_out`, in the order of `seed`; count those cut or left out, by
        reason. Raise DataError if a row cannot be read.
        """


def encoder_of(
    source: Source, data: Data, tokenizer: Any, longest: int, *, length: int = 0, texts: Sequence[Table] = ()
) -> Encoder:
    """Return the encoder of a source. Examples and chats have at most `longest` tokens, recall documents at most
    `length`, with lines of `texts`. Raise DataError if the tokenizer cannot encode such rows.
    """
    if data.has_examples:
        return Prompter(data, tokenizer, longest)
    if source.has_chats:
        return ChatTemplate(
            tokenizer,
            longest,
            train_on_all=data.loss == "all",
            special_tokens=data.special_tokens,
        )
    if source.name == RECALL:
        return RecallEncoder(data, tokenizer, length, texts)
    return TextEncoder(data, tokenizer)


@dataclass
class TextEncoder:
    """Encodes documents. The loss counts every token."""

    data: Data
    tokenizer: Any

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return texts in token ids with the BOS of the tokenizer, if it has one, and EOS."""
        sequences = tokenized(self.tokenizer, texts, self.data.special_tokens)
        end = self.tokenizer.eos_token_id
        for ids in sequences:
            if end not in ids[-1:]:
                ids.append(end)
        return sequences

    def rows(
        self, table: Table, counts: Counter[str], seed: int | None = None, *, held_out: bool = False
    ) -> Iterator[Labelled]:
        """Yield the documents of a table that have `min_document_tokens`."""
        fewest_tokens = self.data.min_document_tokens
        for batch in in_batches(table.documents(seed, held_out)):
            sequences = self.encode([document.text for document in batch])
            for document, ids in zip(batch, sequences, strict=True):
                if len(ids) >= fewest_tokens:
                    yield Labelled(ids, [True] * len(ids), document.name)
                else:
                    counts[f"documents of under {fewest_tokens} tokens left out"] += 1


@dataclass
class RecallEncoder(TextEncoder):
    """Encodes synthetic documents of at most `length` tokens, with lines of `texts`, without end."""

    length: int
    texts: Sequence[Table]

    def rows(
        self, table: Table, counts: Counter[str], seed: int | None = None, *, held_out: bool = False
    ) -> Iterator[Labelled]:
        """Yield documents drawn by the seed of the recipe; the lines of `table` are used if there are no `texts`."""

        def encode(text: str) -> Tokens:
            return self.encode([text])[0]

        frame = len(encode(""))  # BOS and EOS

        def count(text: str) -> int:
            return len(encode(text)) - frame

        texts = self.texts or [table]
        lines: list[str] = []
        for lines_table in texts:
            lines += itertools.islice(lines_of(lines_table), MAX_LINES // len(texts))
        rng = random.Random(self.data.seed)
        while True:
            ids = encode(recall_document(rng, self.length - frame, count, lines))
            yield Labelled(ids, [True] * len(ids), RECALL)


def lines_of(table: Table) -> Iterator[str]:
    """Yield the lines of the training text that are not blank; a long line is wrapped."""
    for document in table.documents():
        for line in document.text.splitlines():
            if len(line) <= LINE_WIDTH and line.isascii():
                # As textwrap does, which takes longer than the rest of packing.
                if text := line.rstrip():
                    yield text
            else:
                yield from textwrap.wrap(line, LINE_WIDTH, expand_tabs=False, replace_whitespace=False)
