"""Which documents of a source perplexity is measured on, as token ids with the bytes of text that they stand for."""

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from pi_lora.data.documents import Document
from pi_lora.data.sources import STDLIB, evaluation_documents
from pi_lora.data.tokens import Tokens, in_batches, tokenized
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import check_ids
from pi_lora.models.files import BUILTIN
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
    """A document as it is measured: its name, its token ids, truncated if asked, and how many bytes of UTF-8 text one
    of them other than BOS stands for on average.
    """

    name: str
    ids: "array[int]"
    bytes_per_token: float


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


def choose_documents(model: Model, options: PerplexityOptions, longest: int) -> tuple[list[TokenizedDocument], int]:
    """Return the first documents that the options ask for, or with a seed as many at random, for windows of up to
    `longest` tokens; and how many others were too short. Raise DataError if none is long enough.
    """
    needed, too_short, longest_text = max(longest, options.min_tokens or 0), 0, 0
    read = partial(
        evaluation_documents, options.data or STDLIB, options.split, options.column, options.subset, options.hold_out
    )
    documents: Iterable[Document] = read()
    if options.seed is not None:
        sizes = [len(document.text.encode()) + FRAME_TOKENS for document in documents]
        order = [number for number, size in enumerate(sizes) if size >= needed] or [sizes.index(max(sizes))]
        random.Random(options.seed).shuffle(order)
        too_short = len(sizes) - len(order)
        documents = _in_order(read, order, options.documents or len(order))
    chosen: list[TokenizedDocument] = []
    for document, ids in _tokenized(model, documents):
        longest_text = max(longest_text, len(ids))
        if len(ids) < needed:
            too_short += 1
            continue
        check_ids(model, ids)
        kept = array("i", ids[: options.truncate])
        text = document.text if len(kept) == len(ids) else model.tokenizer.decode(kept, skip_special_tokens=True)
        tokens = len(kept) - (kept[0] == model.tokenizer.bos_token_id)
        chosen.append(TokenizedDocument(document.name, kept, len(text.encode()) / tokens))
        if len(chosen) == options.documents:
            break
    if not chosen:
        shorter = f"{options.data}: the longest document has {longest_text} tokens, {needed} are needed"
        raise DataError(f"--data: {shorter}; name longer texts, or choose a shorter window")
    return chosen, too_short


def _in_order(read: Callable[[], Iterable[Document]], order: Sequence[int], at_once: int) -> Iterator[Document]:
    """Yield documents by their numbers in `order`; every `at_once` of them are read anew, and no others are held."""
    for start in range(0, len(order), at_once):
        wanted = order[start : start + at_once]
        held = {number: document for number, document in enumerate(read()) if number in set(wanted)}
        yield from map(held.__getitem__, wanted)


def _tokenized(model: Model, documents: Iterable[Document]) -> Iterator[tuple[Document, Tokens]]:
    """Yield documents and token ids; without EOS, which the model would be asked to predict."""
    for batch in in_batches(documents, lambda document: len(document.text)):
        yield from zip(batch, tokenized(model.tokenizer, [document.text for document in batch]), strict=True)
