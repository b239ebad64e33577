"""Sliding-window perplexity of a model on the documents of a source: model and source in, typed result out."""

import hashlib
import math
import random
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

from pi_lora.data.documents import Document
from pi_lora.data.sources import Choice, evaluation_documents
from pi_lora.data.tokens import CHARACTERS_AT_ONCE, Tokens, in_batches, tokenized
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import check_ids, check_numbers, depends_on_length, described
from pi_lora.evaluation.journal import Journal, journaled
from pi_lora.evaluation.perplexity import losses
from pi_lora.evaluation.perplexity.losses import DocumentLosses, Sweep, window_scores
from pi_lora.evaluation.results import DocumentPerplexity, LossByPosition, PerplexityScores, PositionLoss
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.types import Progress, silent

# What a tokenizer may add to a text, such as BOS; of the text itself it makes at most one token per byte.
FRAME_TOKENS = 16
BINS = 32
ALL_DOCUMENTS = Choice()


class Measured(NamedTuple):
    """A document as it is measured: its name, its token ids, truncated if asked, and the bytes of its text before each
    token and in all of them.
    """

    name: str
    ids: "array[int]"
    bytes_before: "array[float]"


class Chosen(NamedTuple):
    """The documents that are measured, the choice that was applied, and how many documents were too short for it."""

    documents: list[Measured]
    choice: Choice
    too_short: int


def evaluate_perplexity(
    loaded: Model,
    source: str,
    windows: Sequence[int] | None = None,
    stride: int | None = None,
    choice: Choice = ALL_DOCUMENTS,
    progress: Progress = silent,
    *,
    by_position: bool = False,
    shared: bool = False,
) -> PerplexityScores:
    """Measure those documents of `source` that `choice` takes and that are at least as long as the longest window, by
    default the model's own. `by_position` adds the mean loss by the tokens before a token in the longest window. With
    `shared` each process measures its part of the documents, with the whole model, and an interrupted evaluation
    continues when it is called again.
    """
    windows, stride = PerplexityOptions(windows=tuple(windows) if windows else None, stride=stride).sweep(loaded.window)
    longest = max(windows)
    bins = min(BINS, longest - 1) if by_position else 0
    sweep = Sweep(tuple(windows), stride, bins, depends_on_length(loaded.config))
    chosen = choose_documents(loaded, source, choice, longest)
    decided_by, what = {"data": source, **asdict(sweep)}, f"of {len(chosen.documents)} documents"
    with journaled(loaded, decided_by, what, shared) as journal:
        found = _measure(loaded, chosen.documents, sweep, journal, progress)
    sizes = [sweep.scored_bytes(document.bytes_before) for document in chosen.documents]
    total = losses.added(loss for each in found for loss in each.by_window.values())
    check_numbers(loaded.name, loaded.model.dtype, math.isfinite(total.loss))
    return PerplexityScores(
        **described(loaded),
        data=source,
        documents=len(chosen.documents),
        documents_too_short=chosen.too_short,
        min_tokens=chosen.choice.min_tokens,
        truncate=chosen.choice.truncate,
        seed=chosen.choice.seed,
        bos=chosen.documents[0].ids[0] == loaded.tokenizer.bos_token_id,
        stride=stride,
        weighting="token",
        windows=window_scores(found, sizes),
        per_document=[
            DocumentPerplexity(name=document.name, tokens=len(document.ids), windows=window_scores([its], [size]))
            for document, its, size in zip(chosen.documents, found, sizes, strict=True)
        ],
        **({"by_position": _by_position(found, longest)} if by_position else {}),
    )


def _measure(
    loaded: Model, documents: Sequence[Measured], sweep: Sweep, journal: Journal, progress: Progress
) -> list[DocumentLosses]:
    names = [hashlib.sha256(document.ids).hexdigest() for document in documents]
    ids = {name: document.ids for name, document in zip(names, documents, strict=True)}
    total = sum(len(piece) for name in journal.left(list(ids)) for piece in sweep.plan(len(ids[name])))
    done, before, longest = 0, [losses.LossSum()], max(sweep.windows)

    def count(pieces: int, so_far: DocumentLosses) -> None:
        nonlocal done
        done += pieces
        sums = losses.added([*before, so_far.by_window[longest]])
        progress(done, total, f"perplexity {_perplexity(sums)} at {longest:,} so far" if sums.tokens else "")

    def measure(name: str) -> DocumentLosses:
        its = losses.document_losses(loaded.model, ids[name], sweep, done=count)
        before.append(its.by_window[longest])
        return its

    found = journal.measure(DocumentLosses, list(ids), measure)
    return [found[name] for name in names]


def _perplexity(sums: losses.LossSum) -> str:
    """What overflows is refused at the end, with the reason."""
    mean = sums.loss / sums.tokens
    return f"{math.exp(mean):.2f}" if mean < 100 else "too large"


def _by_position(found: Sequence[DocumentLosses], window: int) -> LossByPosition:
    sums = [losses.added(each) for each in zip(*(each.by_position for each in found), strict=True)]
    bounds = losses.position_bounds(window, len(sums))
    bins = [
        PositionLoss(first=first, last=last, loss=each.loss / each.tokens, tokens=each.tokens)
        for each, first, last in zip(sums, bounds, bounds[1:], strict=False)
    ]
    return LossByPosition(window=window, bins=bins)


def choose_documents(loaded: Model, source: str, choice: Choice, longest: int) -> Chosen:
    """Return the documents of `source` for windows of up to `longest` tokens; a preset completes the `choice`."""
    choice = choice.of(source)
    if choice.truncate is not None and choice.truncate < longest:
        raise DataError(f"--truncate: {choice.truncate} tokens do not hold a window of {longest}; choose more")
    needed = max(longest, choice.min_tokens or 0)
    documents: Iterable[Document] = evaluation_documents(source, choice.split, choice.column)
    passed_over = 0
    if choice.seed is not None:
        documents, passed_over = _drawn(documents, choice.seed, needed)
    found: list[Measured] = []
    lengths: list[int] = []
    size_of = bytes_of_tokens(loaded.tokenizer)
    for document, ids in _encoded(loaded, documents):
        lengths.append(len(ids))
        if len(ids) >= needed:
            check_ids(loaded, ids)
            before, kept = bytes_before(ids, document.text, size_of), array("i", ids[: choice.truncate])
            found.append(Measured(document.name, kept, before[: len(kept) + 1]))
        if len(found) == choice.documents:
            break
    if not found:
        option = "--windows" if needed == longest else "--min-tokens"
        longer = f"{needed} tokens is longer than every document of {source} (the longest has {max(lengths)})"
        raise DataError(f"{option}: {longer}; choose a shorter window")
    return Chosen(found, choice, passed_over + len(lengths) - len(found))


def _drawn(documents: Iterable[Document], seed: int, needed: int) -> tuple[list[Document], int]:
    """Return what may have `needed` tokens by its bytes, or else the longest, shuffled, and how many others came."""
    held: list[Document] = []
    longest, seen = Document("", ""), 0
    for document in documents:
        seen += 1
        longest = max(longest, document, key=lambda each: len(each.text))
        if len(document.text.encode()) + FRAME_TOKENS >= needed:
            held.append(document)
    held = held or [longest]
    random.Random(seed).shuffle(held)
    return held, seen - len(held)


def _encoded(loaded: Model, documents: Iterable[Document]) -> Iterator[tuple[Document, Tokens]]:
    """Yield documents and token ids; without EOS, which the model would be asked to predict."""
    for batch in in_batches(documents, lambda document: len(document.text), CHARACTERS_AT_ONCE):
        yield from zip(batch, tokenized(loaded.tokenizer, [document.text for document in batch]), strict=True)


def bytes_of_tokens(tokenizer: Any) -> Callable[[int], int]:
    """Return a function of an id to the bytes of UTF-8 that its token stands for, of a character that several tokens
    share those of each; none of BOS and the like.
    """
    # Each character of its tokens is a byte.
    byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder) if tokenizer.is_fast else False
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}

    @cache
    def size_of(index: int) -> int:
        token: str = tokenizer.convert_ids_to_tokens(index)
        if not byte_level and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return 1
        if index in tokenizer.all_special_ids:
            return 0
        if index in added or not byte_level:
            return len(token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode())  # SentencePiece's space
        return len(token)

    return size_of


def bytes_before(ids: Tokens, text: str, size_of: Callable[[int], int]) -> "array[float]":
    """Return the bytes of `text` before each of its tokens, and in all. Of the space that Llama's tokenizer puts before
    a text the first token loses its byte; where a tokenizer changes a text otherwise (NFC), all are scaled alike.
    """
    sizes: list[float] = list(map(size_of, ids))
    surplus = sum(sizes) - len(text.encode())
    if surplus == 1:
        sizes[next(index for index, size in enumerate(sizes) if size)] -= 1
    elif surplus and any(sizes):
        sizes = [size * (1 - surplus / sum(sizes)) for size in sizes]
    return array("d", accumulate(sizes, initial=0.0))
