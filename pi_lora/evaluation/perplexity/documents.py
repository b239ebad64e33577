"""Which documents of a source perplexity is measured on, as token ids with the bytes of text that they stand for."""

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, groupby, islice, repeat
from typing import Any, NamedTuple

from pi_lora.data.documents import Document
from pi_lora.data.sources import STDLIB, evaluation_documents
from pi_lora.data.tokens import CHARACTERS_AT_ONCE, PIECE, Tokens, in_batches, pieces, tokenized
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import check_ids
from pi_lora.models.location import BUILTIN
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.types import Json

# What a tokenizer may add to a text, such as BOS; of the text itself it makes at most one token per byte.
FRAME_TOKENS = 16
# The paper's choice of documents: 128 of 32768 tokens and more; which the paper drew is not known. Of the standard
# library what the built-in model reads in a minute or two on two cores.
DEFAULTS: dict[str, dict[str, int]] = {
    "proof-pile": {"documents": 128, "min_tokens": 32768, "truncate": 32768, "seed": 0},
    STDLIB: {"documents": 12},
}


class TokenizedDocument(NamedTuple):
    """A document as it is measured: its name, its token ids, truncated if asked, and the bytes of its text before each
    token and in all of them.
    """

    name: str
    ids: "array[int]"
    bytes_before: "array[float]"


class Chosen(NamedTuple):
    """The documents that are measured, and how many others were too short."""

    documents: list[TokenizedDocument]
    too_short: int


def completed(options: PerplexityOptions, models: Sequence[Model]) -> PerplexityOptions:
    """Return the options with text, documents, windows and stride, alike for all models. The text is by default the one
    that the recipe of a run names, and of the built-in model the standard library. Raise DataError if there is none.
    """
    recipes = [model.recipe for model in models if model.recipe]
    if options.data is None and (named := [each for recipe in recipes if (each := recipe.evaluation.perplexity)]):
        options = named[0].changed(**options.model_dump(exclude_defaults=True))
    bases = [model.recipe.model.name if model.recipe else model.base for model in models]
    if options.data is None and not all(base.startswith(BUILTIN) for base in bases):
        raise DataError(f"--data: name a text that {models[0].name} was not tuned on: a file, folder or hub data set")
    data = options.data or STDLIB
    windows, stride = options.sweep(max(model.window for model in models))
    default: Json = {"data": data, "windows": windows, "stride": stride, **DEFAULTS.get(data, {})}
    return options.changed(**default | options.model_dump(exclude_none=True))


def choose_documents(model: Model, options: PerplexityOptions, longest: int) -> Chosen:
    """Return the first documents that the options ask for, or with a seed as many at random, for windows of up to
    `longest` tokens. Raise DataError if there are none.
    """
    if options.truncate is not None and options.truncate < longest:
        raise DataError(f"--truncate: {options.truncate} tokens do not hold a window of {longest}; choose more")
    needed, passed_over = max(longest, options.min_tokens or 0), 0
    read = partial(
        evaluation_documents, options.data or STDLIB, options.split, options.column, options.subset, options.hold_out
    )
    documents: Iterable[Document] = read()
    if options.seed is not None:
        order, passed_over = _shuffled(documents, options.seed, needed)
        documents = _in_order(read, order, options.documents or len(order))
    chosen: list[TokenizedDocument] = []
    lengths: list[int] = []
    for document, ids in _tokenized(model, documents):
        lengths.append(len(ids))
        if len(ids) >= needed:
            chosen.append(_document(model, document, ids, options.truncate))
        if len(chosen) == options.documents:
            break
    if not chosen:
        shorter = f"{options.data}: the longest document has {max(lengths)} tokens, {needed} are needed"
        raise DataError(f"--data: {shorter}; name longer texts, or choose a shorter window")
    return Chosen(chosen, passed_over + len(lengths) - len(chosen))


def _shuffled(documents: Iterable[Document], seed: int, needed: int) -> tuple[list[int], int]:
    """Return the numbers of what may have `needed` tokens by its bytes, or else of the longest, in random order, and
    how many others there are.
    """
    sizes = [len(document.text.encode()) + FRAME_TOKENS for document in documents]
    candidates = [number for number, size in enumerate(sizes) if size >= needed] or [sizes.index(max(sizes))]
    random.Random(seed).shuffle(candidates)
    return candidates, len(sizes) - len(candidates)


def _in_order(read: Callable[[], Iterable[Document]], order: Sequence[int], at_once: int) -> Iterator[Document]:
    """Yield documents by their numbers in `order`; every `at_once` of them are read anew, and no others are held."""
    for start in range(0, len(order), at_once):
        wanted = set(order[start : start + at_once])
        held = {number: document for number, document in enumerate(read()) if number in wanted}
        yield from (held[number] for number in order[start : start + at_once])


def _tokenized(model: Model, documents: Iterable[Document]) -> Iterator[tuple[Document, Tokens]]:
    """Yield documents and token ids; without EOS, which the model would be asked to predict."""
    for batch in in_batches(documents, lambda document: len(document.text), CHARACTERS_AT_ONCE):
        yield from zip(batch, tokenized(model.tokenizer, [document.text for document in batch]), strict=True)


def _document(model: Model, document: Document, ids: Tokens, truncate: int | None) -> TokenizedDocument:
    check_ids(model, ids)
    kept = array("i", ids[:truncate])
    sizes = islice(chain(token_bytes(model.tokenizer, document.text, ids), repeat(0.0)), len(kept))
    return TokenizedDocument(document.name, kept, array("d", accumulate(sizes, initial=0.0)))


def token_bytes(tokenizer: Any, text: str, ids: Sequence[int]) -> Iterator[float]:
    """Yield the bytes of UTF-8 that each token of a text stands for: those between the end of the token before it and
    its own end. Tokens of one character share its bytes; BOS has none. A tokenizer that does not tell
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
