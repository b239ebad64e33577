"""The gain of a model from distant context: the loss of each token with the whole window before it, and with the near
context alone. Key tokens are those that distant context explains; LongPPL is the perplexity over them (Fang et al.
2024, "What is Wrong with Perplexity for Long-context Language Modeling?", arXiv 2410.23771).
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import torch
from pydantic import Field

from pi_lora.data.tokens import added_prefix, token_spans
from pi_lora.drawing import Panel, draw_curves, draw_marked_text
from pi_lora.errors import DataError, ModelError
from pi_lora.evaluation.duration import budget_here
from pi_lora.evaluation.forward import check_numbers, pass_tokens
from pi_lora.evaluation.intervals import of_means
from pi_lora.evaluation.measurement import (
    About,
    Measurement,
    Metric,
    Preview,
    Result,
    Scores,
    Session,
    Value,
    average,
    header_of,
)
from pi_lora.evaluation.perplexity import Piece, Sweep, scored_losses
from pi_lora.evaluation.texts import TokenizedDocument, choose_documents, complete, text_problems
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.source import ModelSource
from pi_lora.models.weights import finite
from pi_lora.recipe.evaluation import ContextOptions
from pi_lora.storage import read_json

# A key token gains more nats than this from distant context, and with it has a loss below this (the paper's alpha and
# -beta).
LEAST_GAIN = 2.0
MOST_LOSS = 2.0
# Bins of the gain by the number of tokens before a token.
BINS = 12
# Tokens of the text that is drawn with its key tokens.
EXCERPT_TOKENS = 160

# A text without the spaces around it.
WORD = re.compile(r"\S(?:.*\S)?", re.DOTALL)
# The first character and the one after the last.
Span = tuple[int, int]


class GainByDistance(Result):
    """The mean gain in nats of tokens with `first` to `last` - 1 tokens before them in their window."""

    first: int = Field(alias="from")
    last: int = Field(alias="to")
    gain: float
    tokens: int


class DocumentContext(Result):
    """One document: the mean loss of the scored tokens with the whole window, and their mean gain, in nats; the same of
    the key tokens, None without one, and these as spans of characters.
    """

    name: str
    sha256: str
    tokens: int
    loss: float
    gain: float
    key_tokens: int
    key_loss: float | None
    key_gain: float | None
    spans: list[Span]


class ContextScores(Scores):
    """Scored are the tokens of whole windows that have `short_window` tokens or more before them. `evaluator` is the
    model whose key tokens count.
    """

    measurement = "context"

    options: ContextOptions
    documents: int
    documents_too_short: int
    short_window: int
    evaluator: str
    per_document: list[DocumentContext]
    by_distance: list[GainByDistance]
    excerpt: list[tuple[str, float]]


class Context(Measurement[ContextOptions, ContextScores]):
    """The gain from distant context, and LongPPL."""

    options = ContextOptions
    scores = ContextScores

    def prepare(self, options: ContextOptions, models: Sequence[ModelSource]) -> ContextOptions:
        """Fill in text, documents, windows and stride, alike for all models."""
        options = complete(options, models)
        longest = max(model.window for model in models)
        window, short_window, stride = options.sizes(longest)
        amount = options.amount(longest, budget_here())
        return options.changed(window=window, short_window=short_window, stride=stride, **amount)

    def problems(self, options: ContextOptions, preview: Preview) -> Iterator[str]:
        """Yield the problems of the text, and of the file of key tokens."""
        window = options.window or preview.window
        of_text = text_problems(options, preview, window=window)
        yield from of_text
        try:
            given = read_key_tokens(options)
        except ModelError as problem:
            yield f"{preview.key('key_tokens')}: {problem}"
            return
        if given and preview.tokenizer and not of_text:
            measured = options.changed(**options.amount(preview.window, budget_here()))
            documents, _ = choose_documents(preview, measured, window)
            try:
                for document in documents:
                    _spans_for(document, given)
            except DataError as problem:
                yield str(problem).replace("--key-tokens", preview.key("key_tokens"))

    def measure(self, model: LoadedModel, options: ContextOptions, session: Session) -> ContextScores:
        """Measure the consecutive windows of the documents. The processes divide the windows."""
        window, short_window, stride = options.sizes(model.window)
        documents, too_short = choose_documents(model, options, window)
        windows = [
            (document, start) for document in documents for start in range(0, len(document.ids) - window + 1, window)
        ]

        def losses_of_window(index: int) -> list[list[float]]:
            document, start = windows[index]
            ids = document.ids[start : start + window]
            return [losses.tolist() for losses in context_losses(model, ids, short_window, stride)]

        decided_by = {"texts": [document.digest for document in documents]}
        near = [(0, short_window + stride)] * ((window - short_window) // stride)
        results = session.map_items(
            model,
            options,
            decided_by,
            items=range(len(windows)),
            function=losses_of_window,
            about=About(
                "context",
                f"{len(windows)} windows of {len(documents)} documents",
                ("documents", len(documents) // 4 or len(documents) - 1),
            ),
            passes=lambda _: [(0, window), *near],
        )
        losses = torch.tensor(results, dtype=torch.double)  # (windows, 2, scored tokens)
        check_numbers(model, finite(losses))
        losses_by_document = torch.split(losses, [len(document.ids) // window for document in documents])
        given = read_key_tokens(options)
        per_document = []
        for document, of_document in zip(documents, losses_by_document, strict=True):
            spans = _scored_spans(model, document, window=window, short_window=short_window)
            key_spans = _spans_for(document, given) if given else None
            per_document.append(_document_scores(document, spans, of_document, key_spans))
        gains = losses[:, 1] - losses[:, 0]
        return ContextScores(
            **header_of(model, window),
            options=options,
            documents=len(documents),
            documents_too_short=too_short,
            short_window=short_window,
            evaluator=given.evaluator if given else model.name,
            per_document=per_document,
            by_distance=_by_distance(gains[:, stride:], short_window + stride),
            excerpt=_excerpt(model, windows, gains, short_window),
        )

    def metrics(self, scores: ContextScores) -> Iterator[Metric]:
        """Yield the gain, the share of key tokens, and LongPPL with the whole window and with the near context."""
        documents = scores.per_document
        data = scores.options.data or ""
        yield average(
            label="gain from distant context",
            mean=fmean([document.gain for document in documents], [document.tokens for document in documents]),
            values=[
                Value(f"{document.name} of {document.tokens} tokens", document.gain, document.tokens)
                for document in documents
            ],
            unit="nats",
            at=scores.window,
            digits=4,
            dataset=data,
            hub_name="gain from distant context",
        )
        whose = f"key tokens of {Path(scores.evaluator).name}" if scores.options.key_tokens else "own key tokens"
        yield _share_of_key_tokens(scores, whose)
        for at, gained in ((scores.window, 0), (scores.short_window, 1)):
            values = [
                Value(
                    f"{document.name}, {document.key_tokens} key tokens of {scores.evaluator}",
                    math.exp(document.key_loss + gained * document.key_gain),
                    document.key_tokens,
                )
                for document in documents
                if document.key_loss is not None and document.key_gain is not None
            ]
            if values:
                losses = [math.log(value.value) for value in values]
                yield Metric(
                    label=f"LongPPL, {whose}",
                    value=math.exp(fmean(losses, [value.weight for value in values])),
                    higher_is_better=False,
                    at=at,
                    digits=3,
                    values=values,
                    is_ratio=True,
                    dataset=data,
                    hub_name="LongPPL",
                )

    def panels(self, scores: Mapping[str, ContextScores]) -> Iterator[Panel]:
        """Yield the gain by distance of all models, and a text with the key tokens of the last one."""
        curves = {label: [(part.first, part.gain) for part in result.by_distance] for label, result in scores.items()}
        yield partial(draw_curves, curves, xlabel="tokens before, in the window", ylabel="gain (nats per token)")
        *_, (label, last) = scores.items()
        yield partial(draw_marked_text, last.excerpt, f"what distant context explains: {label}")


def _share_of_key_tokens(scores: ContextScores, whose: str) -> Metric:
    """Return the share of key tokens, with the interval over the documents."""
    documents = scores.per_document
    tokens = [document.tokens for document in documents]
    key_tokens = [document.key_tokens for document in documents]
    interval = of_means([[(0.0, 100 * keys / scored, scored) for keys, scored in zip(key_tokens, tokens, strict=True)]])
    if interval:
        interval = max(0.0, interval[0]), interval[1]
    return Metric(
        label=whose,
        value=100 * sum(key_tokens) / sum(tokens),
        unit="%",
        at=scores.window,
        digits=4,
        interval=interval,
    )


def context_losses(
    model: LoadedModel, ids: Sequence[int], short_window: int, stride: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses in nats of the tokens of a window from `short_window` on: (tokens - short_window) each.

    The first are those with all tokens of the window before them, the second those with `short_window` to
    `short_window + stride - 1` tokens before them. What the tokenizer adds, such as BOS, takes the place of the first
    tokens of each context. The first `stride` tokens have the same context twice, and gain nothing.
    """
    module = model.module
    prefix = added_prefix(model.tokenizer)
    tokens_at_once = 1 if model.source.rope.depends_on_length else pass_tokens(module)
    whole = Piece(
        0,
        len(ids),
        {"whole": range(short_window, len(ids))},
        score_all=False,
    )
    [(_, _, far)] = scored_losses(module, ids, [whole], prefix)
    near = far.clone()
    for pieces in Sweep((short_window + stride,), stride).passes(len(ids), tokens_at_once):
        if pieces[0].start:
            for _, tokens, losses in scored_losses(module, ids, pieces, prefix):
                near[tokens.start - short_window : tokens.stop - short_window] = losses
    return far, near


def read_key_tokens(options: ContextOptions) -> ContextScores | None:
    """Return the scores whose key tokens the options name, if any; raise ModelError if the file has none."""
    if options.key_tokens is None:
        return None
    remedy = "give what `pi-lora eval context EVALUATOR --json FILE` wrote of one model"
    return read_json(Path(options.key_tokens), ContextScores, remedy)


def _spans_for(document: TokenizedDocument, given: ContextScores) -> list[Span]:
    """Return the key tokens that are given for a document."""
    for other in given.per_document:
        if other.sha256 == document.digest:
            return other.spans
    raise DataError(
        f"--key-tokens: {given.options.key_tokens or given.evaluator} was not measured on {document.name}; "
        "measure both on the same documents"
    )


def _scored_spans(model: LoadedModel, document: TokenizedDocument, *, window: int, short_window: int) -> list[Span]:
    """Return the characters that the scored tokens of a document stand for, without the spaces around them."""
    spans = token_spans(model.tokenizer, document.text)
    scored = []
    for start in range(0, len(document.ids) - window + 1, window):
        for first, last in spans[start + short_window : start + window]:
            word = WORD.search(document.text, first, last)
            scored.append(word.span() if word else (first, last))
    return scored


def _document_scores(
    document: TokenizedDocument, spans: Sequence[Span], losses: torch.Tensor, key_spans: Sequence[Span] | None
) -> DocumentContext:
    """Return the scores of a document from the `losses` (windows, 2, scored tokens) and the `spans` of its tokens; the
    key tokens are those within the spans that are given, or else those that gain most.
    """
    far, near = losses.transpose(0, 1).flatten(1)
    gain = near - far
    if key_spans is None:
        is_key = (gain > LEAST_GAIN) & (far < MOST_LOSS)
    else:
        is_key = torch.tensor([_is_within(span, key_spans) for span in spans])
    keys = is_key.nonzero().flatten().tolist()
    return DocumentContext(
        name=document.name,
        sha256=document.digest,
        tokens=len(spans),
        loss=far.mean().item(),
        gain=gain.mean().item(),
        key_tokens=len(keys),
        key_loss=far[keys].mean().item() if keys else None,
        key_gain=gain[keys].mean().item() if keys else None,
        spans=[spans[index] for index in keys],
    )


def _is_within(span: Span, spans: Sequence[Span]) -> bool:
    """Whether the characters of a token lie in one of the spans, which are in order."""
    first, last = span
    index = bisect_right(spans, first, key=itemgetter(0)) - 1
    return index >= 0 and first < last <= spans[index][1]


def _by_distance(gains: torch.Tensor, least: int) -> list[GainByDistance]:
    """Return the mean of the gains (windows, tokens) by the number of tokens before a token, from `least` on."""
    bins = []
    first = least
    for some in gains.tensor_split(BINS, dim=1):
        last = first + some.shape[1]
        if some.numel():
            bins.append(GainByDistance(first=first, last=last, gain=some.mean().item(), tokens=some.numel()))
        first = last
    return bins


def _excerpt(
    model: LoadedModel,
    windows: Sequence[tuple[TokenizedDocument, int]],
    gains: torch.Tensor,
    short_window: int,
) -> list[tuple[str, float]]:
    """Return the tokens and the gains of the passage of `EXCERPT_TOKENS` tokens whose sum of gains is greatest."""
    tokens = min(EXCERPT_TOKENS, gains.shape[1])
    sums = gains.clamp(min=0, max=LEAST_GAIN).unfold(1, tokens, 1).sum(dim=2)
    row, first = divmod(int(sums.argmax()), sums.shape[1])
    document, start = windows[row]
    start += short_window + first
    spans = token_spans(model.tokenizer, document.text)[start : start + tokens]
    pieces = [document.text[begin:end] for begin, end in spans]
    return list(zip(pieces, gains[row, first : first + tokens].tolist(), strict=True))
