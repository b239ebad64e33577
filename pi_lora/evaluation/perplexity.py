"""Sliding-window perplexity (Press et al. 2022; paper.tex, section 3.2): which documents, typed scores, metrics and
picture.
"""

import hashlib
import math
import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic import Field

from pi_lora.data.documents import Document
from pi_lora.data.sources import STDLIB, evaluation_documents
from pi_lora.data.tokens import tokenized
from pi_lora.drawing import Panel, draw_curves, label_logarithmic, label_windows
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import check_numbers, depends_on_length, described, pass_tokens
from pi_lora.evaluation.measurement import Measurement, Metric, Result, Scores, Session, Value
from pi_lora.evaluation.sliding_windows import LossSums, Piece, Sweep, added, pass_losses
from pi_lora.models.files import BUILTIN
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.types import Json

BINS = 32
# Nats a token; the perplexity of a greater mean loss is infinite.
MOST_LOSS = 700.0
# The paper's choice of documents: 128 of 32768 tokens and more; which the paper drew is not known. Of the standard
# library what the built-in model reads in a minute or two on two cores.
DEFAULTS: dict[str, dict[str, int]] = {
    "proof-pile": {"documents": 128, "min_tokens": 32768, "truncate": 32768, "seed": 0},
    STDLIB: {"documents": 12},
}
# Options that choose a text and are named in the caption of a table where they are not as usual.
CHOICE = {"subset", "split", "hold_out", "column", "seed", "truncate"}


class WindowPerplexity(Result):
    """The perplexity at one window length (tokens) over `tokens` scored tokens, each weighted equally."""

    window: int
    perplexity: float
    tokens: int


class DocumentPerplexity(Result):
    """The perplexities of one document."""

    name: str
    tokens: int
    windows: list[WindowPerplexity]


class PositionLoss(Result):
    """The mean loss in nats of tokens with `first` to `last` - 1 tokens before them in their window."""

    first: int = Field(alias="from")
    last: int = Field(alias="to")
    loss: float
    tokens: int


class LossByPosition(Result):
    """The loss by position in windows of `window` tokens that do not overlap."""

    window: int
    bins: list[PositionLoss]


class PerplexityScores(Scores):
    """Sliding-window perplexity of `documents`, chosen and truncated as the options say."""

    measurement = "perplexity"

    options: PerplexityOptions | None = None
    data: str = ""
    documents: int | None = None
    documents_too_short: int | None = None
    bos: bool | None = None
    stride: int = 0
    weighting: str = "token"
    windows: list[WindowPerplexity]
    per_document: list[DocumentPerplexity] | None = None
    by_position: LossByPosition | None = None


class Perplexity(Measurement[PerplexityOptions, PerplexityScores]):
    """Sliding-window perplexity (paper, section 3.2)."""

    name = "perplexity"
    options = PerplexityOptions
    scores = PerplexityScores

    def prepare(self, options: PerplexityOptions, models: Sequence[Model]) -> PerplexityOptions:
        """Fill in text, documents, windows and stride, alike for all models. The text is by default the one that the
        recipe of a run names, and of the built-in model the standard library. Raise DataError if there is none.
        """
        asked = [model.recipe.evaluation.perplexity for model in models if model.recipe]
        own = next(filter(None, asked), None)
        if options.data is None and own:
            options = own.changed(**options.model_dump(exclude_defaults=True))
        bases = [model.recipe.model.name if model.recipe else model.base for model in models]
        if options.data is None and not all(base.startswith(BUILTIN) for base in bases):
            wanted = f"name a text that {models[0].name} was not tuned on"
            raise DataError(f"--data: {wanted}: a file, folder or hub data set")
        data = options.data or STDLIB
        windows, stride = options.sweep(max(model.window for model in models))
        default: Json = {"data": data, "windows": windows, "stride": stride, **DEFAULTS.get(data, {})}
        return options.changed(**default | options.model_dump(exclude_none=True))

    def run(self, model: Model, options: PerplexityOptions, session: Session) -> PerplexityScores:
        """Measure the documents that the options choose and that are at least as long as the longest window. If the
        session is shared, each process makes its share of the forward passes, with the whole model, and an interrupted
        evaluation continues when it is called again.
        """
        options = self.prepare(options, [model])
        windows, stride = options.sweep(model.window)
        bins = min(BINS, max(windows) - 1) if options.by_position else 0
        sweep = Sweep(windows, stride, bins, depends_on_length(model.config))
        documents, too_short = choose_documents(model, options, max(windows))
        measured = _measure(model, documents, sweep, session)
        per_document = [
            DocumentPerplexity(name=name, tokens=len(ids), windows=window_scores(passes, windows))
            for (name, ids), passes in zip(documents, measured, strict=True)
        ]
        check_numbers(model, all(math.isfinite(row.perplexity) for each in per_document for row in each.windows))
        passes = [each for of_document in measured for each in of_document]
        return PerplexityScores(
            **described(model),
            options=options,
            data=options.data or "",
            documents=len(documents),
            documents_too_short=too_short,
            bos=documents[0].ids[0] == model.tokenizer.bos_token_id,
            stride=stride,
            weighting="token",
            windows=window_scores(passes, windows),
            per_document=per_document,
            **({"by_position": _by_position(passes, sweep)} if bins else {}),
        )

    def metrics(self, scores: PerplexityScores) -> list[Metric]:
        """Return the perplexity by window, with those of the documents."""
        values: dict[int, list[Value]] = {row.window: [] for row in scores.windows}
        for document in scores.per_document or ():
            for row in document.windows:
                name = f"{document.name} of {document.tokens} tokens"
                values[row.window].append(Value(name, row.perplexity, row.tokens))
        about: Json = {"digits": 3, "is_ratio": True, "higher_is_better": False, "dataset": scores.data}
        return [
            Metric(
                "perplexity",
                row.perplexity,
                at=row.window,
                samples=row.tokens,
                values=values[row.window],
                hub_name="perplexity",
                **about,
            )
            for row in scores.windows
        ]

    def about(self, scores: Sequence[PerplexityScores]) -> str:
        """Return the text, the documents, the stride and the weighting."""
        first, options = scores[0], scores[0].options or PerplexityOptions()
        least = max([row.window for row in first.windows] + [options.min_tokens or 0])
        chosen = options.model_dump(include=CHOICE, exclude_defaults=True)
        documents = f"{first.documents} document{'s' * (first.documents != 1)} of {first.data}"
        parts = [documents, *(f"{name} {value}" for name, value in chosen.items())]
        parts += [f"of at least {least:,} tokens", f"stride {first.stride}", "every token weighted equally"]
        differ = len({row.tokens for each in scores for row in each.windows[:1]}) > 1
        return ", ".join(parts) + "; the tokenizers differ: perplexities do not compare" * differ

    def panels(self, scores: Mapping[str, PerplexityScores]) -> list[Panel]:
        """Return perplexity by window if there are several, and the loss by position where all have it."""
        panels: list[Panel] = []
        if any(len(each.windows) > 1 for each in scores.values()):
            panels.append(partial(_draw_windows, scores))
        bins = {label: each.by_position.bins for label, each in scores.items() if each.by_position}
        if len(bins) == len(scores):
            panels.append(partial(_draw_positions, bins))
        return panels


def _draw_windows(scores: Mapping[str, PerplexityScores], axes: Any) -> None:
    draw_curves(axes, {label: [(row.window, row.perplexity) for row in each.windows] for label, each in scores.items()})
    label_logarithmic(axes, "perplexity (lower is better)")
    label_windows(axes, [row.window for each in scores.values() for row in each.windows])


def _draw_positions(bins: Mapping[str, Sequence[PositionLoss]], axes: Any) -> None:
    draw_curves(axes, {label: [(part.first, part.loss) for part in each] for label, each in bins.items()})
    axes.set(xlabel="tokens before, in the window", ylabel="loss (nats a token)")


class TokenizedDocument(NamedTuple):
    """A document as it is measured: its name, and its token ids, truncated if asked."""

    name: str
    ids: "array[int]"


def choose_documents(model: Model, options: PerplexityOptions, longest: int) -> tuple[list[TokenizedDocument], int]:
    """Return the first documents that the options ask for, or with a seed as many at random, for windows of up to
    `longest` tokens; and how many others were too short. Raise DataError if none is long enough.
    """
    needed = max(longest, options.min_tokens or 0)
    documents: Iterable[Document] = evaluation_documents(options)
    if options.seed is not None:
        documents = list(documents)
        random.Random(options.seed).shuffle(documents)
    chosen, lengths = list[TokenizedDocument](), list[int]()
    for document in documents:
        [ids] = tokenized(model.tokenizer, [document.text])  # without EOS, which the model would be asked to predict
        lengths.append(len(ids))
        if len(ids) >= needed:
            chosen.append(TokenizedDocument(document.name, array("i", ids[: options.truncate])))
        if len(chosen) == options.documents:
            break
    if not chosen:
        shorter = f"{options.data}: the longest document has {max(lengths)} tokens, {needed} are needed"
        raise DataError(f"--data: {shorter}; name longer texts, or choose a shorter window")
    return chosen, len(lengths) - len(chosen)


def _measure(
    model: Model, documents: Sequence[TokenizedDocument], sweep: Sweep, session: Session
) -> list[list[LossSums]]:
    """Return the losses of every forward pass over each document."""
    planned: list[list[str]] = []
    passes: dict[str, tuple[Sequence[int], list[Piece]]] = {}
    for _, ids in documents:
        digest, at_once = hashlib.sha256(ids).hexdigest(), pass_tokens(model.model)
        own = {f"{digest} {number}": (ids, pieces) for number, pieces in enumerate(sweep.passes(len(ids), at_once))}
        planned.append(list(own))
        passes |= own

    def measure(name: str) -> LossSums:
        return pass_losses(model.model, *passes[name], sweep.apart)

    measured = session.journal(model, asdict(sweep)).measure(LossSums, list(passes), measure, session.progress)
    return [[measured[name] for name in names] for names in planned]


def window_scores(passes: Sequence[LossSums], windows: Sequence[int]) -> list[WindowPerplexity]:
    """Return the perplexities of some forward passes together, every token weighted equally; infinite on overflow."""
    sums, scores = added(passes), []
    for window in windows:
        loss, tokens = sums[f"window {window}"]
        perplexity = math.exp(loss / tokens) if loss / tokens < MOST_LOSS else math.inf
        scores.append(WindowPerplexity(window=window, perplexity=perplexity, tokens=tokens))
    return scores


def _by_position(passes: Sequence[LossSums], sweep: Sweep) -> LossByPosition:
    sums, bins = added(passes), []
    for first, last in pairwise(sweep.positions):
        loss, tokens = sums[f"position {first}"]
        bins.append(PositionLoss(first=first, last=last, loss=loss / tokens, tokens=tokens))
    return LossByPosition(window=max(sweep.windows), bins=bins)
