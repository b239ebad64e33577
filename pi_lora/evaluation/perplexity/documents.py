"""Which documents of a source perplexity is measured on, as token ids with the bytes of text that they stand for."""

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, islice
from typing import Any, NamedTuple

from pi_lora.data.documents import Document
from pi_lora.data.sources import Choice, evaluation_documents
from pi_lora.data.tokens import CHARACTERS_AT_ONCE, PIECE, Tokens, in_batches, pieces, tokenized
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import check_ids
from pi_lora.models.model import Model

# What a tokenizer may add to a text, such as BOS; of the text itself it makes at most one token per byte.
FRAME_TOKENS = 16


class TokenizedDocument(NamedTuple):
    """A document as it is measured: its name, its token ids, truncated if asked, and the bytes of its text before each
    token and in all of them.
    """

    name: str
    ids: "array[int]"
    bytes_before: "array[float]"


class Chosen(NamedTuple):
    """The documents that are measured, the choice that was applied, and how many documents were too short for it."""

    documents: list[TokenizedDocument]
    choice: Choice
    too_short: int


def choose_documents(model: Model, source: str, choice: Choice, longest: int) -> Chosen:
    """Return the documents of `source` for windows of up to `longest` tokens; a preset completes the `choice`."""
    choice = choice.of(source)
    if choice.truncate is not None and choice.truncate < longest:
        raise DataError(f"--truncate: {choice.truncate} tokens do not hold a window of {longest}; choose more")
    needed = max(longest, choice.min_tokens or 0)
    chosen: list[TokenizedDocument] = []
    lengths: list[int] = []

    def read() -> Iterator[Document]:
        return evaluation_documents(source, choice.split, choice.column)

    def add(documents: Iterable[Document]) -> Iterator[TokenizedDocument | None]:
        """Yield each document that is long enough, and None for the others."""
        for document, ids in _tokenized(model, documents):
            lengths.append(len(ids))
            yield _document(model, document, ids, choice.truncate) if len(ids) >= needed else None

    passed_over = 0
    if choice.seed is None:
        for document in add(read()):
            chosen += [document] if document else []
            if len(chosen) == choice.documents:
                break
    else:
        order, passed_over = _shuffled(read(), choice.seed, needed)
        while order and len(chosen) != choice.documents:
            # As many as are missing are read anew: only what is measured is held in memory.
            missing = len(order) if choice.documents is None else choice.documents - len(chosen)
            rank = {number: place for place, number in enumerate(order[:missing])}
            order = order[missing:]
            documents = add(document for number, document in enumerate(read()) if number in rank)
            ranked = sorted(zip(sorted(rank), documents, strict=True), key=lambda pair: rank[pair[0]])
            chosen += [document for _, document in ranked if document]
    if not chosen:
        option = "--windows" if needed == longest else "--min-tokens"
        longer = f"{needed} tokens is longer than every document of {source} (the longest has {max(lengths)})"
        raise DataError(f"{option}: {longer}; choose a shorter window")
    return Chosen(chosen, choice, passed_over + len(lengths) - len(chosen))


def _shuffled(documents: Iterable[Document], seed: int, needed: int) -> tuple[list[int], int]:
    """Return the numbers of what may have `needed` tokens by its bytes, or else of the longest, in random order, and
    how many others there are.
    """
    sizes = [len(document.text.encode()) + FRAME_TOKENS for document in documents]
    candidates = [number for number, size in enumerate(sizes) if size >= needed]
    candidates = candidates or [max(range(len(sizes)), key=lambda number: sizes[number])]
    random.Random(seed).shuffle(candidates)
    return candidates, len(sizes) - len(candidates)


def _tokenized(model: Model, documents: Iterable[Document]) -> Iterator[tuple[Document, Tokens]]:
    """Yield documents and token ids; without EOS, which the model would be asked to predict."""
    for batch in in_batches(documents, lambda document: len(document.text), CHARACTERS_AT_ONCE):
        yield from zip(batch, tokenized(model.tokenizer, [document.text for document in batch]), strict=True)


def _document(model: Model, document: Document, ids: Tokens, truncate: int | None) -> TokenizedDocument:
    check_ids(model, ids)
    kept = array("i", ids[:truncate])
    sizes = islice(token_bytes(model.tokenizer, document.text, ids), len(kept))
    return TokenizedDocument(document.name, kept, array("d", accumulate(sizes, initial=0.0)))


def token_bytes(tokenizer: Any, text: str, ids: Sequence[int]) -> Iterator[float]:
    """Yield the bytes of UTF-8 that each token of a text stands for: those between the end of the token before it and
    its own end. Tokens of one character share its bytes; BOS and the like have none. A tokenizer that does not tell
    where its tokens are gives each the same.
    """
    if not tokenizer.is_fast:
        yield from [len(text.encode()) / len(ids)] * len(ids)
        return
    if ids and ids[0] == tokenizer.bos_token_id:
        yield 0.0
    for part in pieces(text) if len(text) > 2 * PIECE else [text]:
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        spans = tokenizer(part, return_offsets_mapping=True, **options)["offset_mapping"]
        done = 0
        for (_, end), tokens in groupby(map(tuple, spans)):
            number = len(list(tokens))
            yield from [len(part[done:end].encode()) / number] * number
            done = max(done, end)
