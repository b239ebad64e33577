"""Chats: the perplexity of the assistant's turns, and the KL divergence from a base, of next-token distributions."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from statistics import fmean

import torch
from torch.nn.functional import kl_div

from pi_lora.data.chats import ChatTemplate
from pi_lora.data.checks import data_problems
from pi_lora.data.sources import find_table, format_counts, streamed
from pi_lora.data.tokens import Labelled
from pi_lora.errors import DataError
from pi_lora.evaluation.duration import Pass, budget_here
from pi_lora.evaluation.forward import check_numbers, logits_in_parts, pad_rows, split_positions
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
    identity_of,
)
from pi_lora.model_ref import ModelRef
from pi_lora.models.loaded import LoadedModel, load_model
from pi_lora.models.resolve import resolve_model
from pi_lora.models.source import ModelSource
from pi_lora.recipe.budget import MAX_SAMPLES, affordable
from pi_lora.recipe.data import Data, Source
from pi_lora.recipe.evaluation import ChatOptions, number_of
from pi_lora.storage import digest_of
from pi_lora.types import Json

# Chats are far shorter than the window that they fit.
CHATS_OF_A_WINDOW = 10


class ChatScore(Result):
    """One chat: a digest, the perplexity over the `tokens` of the assistant's turns, and KL(base || model) in nats per
    token.
    """

    name: str
    sha256: str = ""
    tokens: int
    perplexity: float
    divergence: float


class ChatScores(Scores):
    """Means over all tokens of the assistant's turns."""

    measurement = "chat"

    options: ChatOptions
    chats: int
    left_out: int
    tokens: int
    perplexity: float
    divergence: float | None = None
    per_chat: list[ChatScore]


class Chats(Measurement[ChatOptions, ChatScores]):
    """Chats: how an extension changes a chat model."""

    options = ChatOptions
    scores = ChatScores

    def prepare(self, options: ChatOptions, models: Sequence[ModelSource]) -> ChatOptions:
        """Fill in the shortest window of the models and the base. Raise DataError if the base has other tokens."""
        windows = [model.window for model in models]
        if options.divergence_from:
            base = resolve_model(ModelRef(options.divergence_from, **vars(models[0].permissions)))
            windows.append(base.window)
            for model in models:
                if vocabulary_of(model) != vocabulary_of(base):
                    raise DataError(
                        f"--divergence-from: {base.name}: has another vocabulary than {model.name}; name its own base"
                    )
        window = options.window or min(windows)
        limit = options.limit or CHATS_OF_A_WINDOW * affordable(budget_here(), window, MAX_SAMPLES)
        return options.changed(window=window, limit=limit)

    def problems(self, options: ChatOptions, preview: Preview) -> list[str]:
        """Return the problems of the chats."""
        return data_problems(
            Data(source=(chats_of(options),)),
            preview.ask_hub,
            key=preview.key("data"),
            tokenizer=preview.tokenizer,
            window=options.window or preview.window,
        )

    def measure(self, model: LoadedModel, options: ChatOptions, session: Session) -> ChatScores:
        """Measure a model, with the base in memory too. Raise DataError if the data cannot be read, or no chat fits."""
        source = chats_of(options)
        limit = number_of(options.limit)
        table = find_table(streamed(source) if limit else source)
        counts = Counter[str]()
        template = ChatTemplate(model.tokenizer, options.window or model.window)
        chats = {chat.name: chat for chat in islice(template.rows(table, counts), limit)}
        for line in format_counts(counts):
            session.say(f"{options.data}: {line}")
        if not chats:
            raise DataError(f"--data: {options.data}: holds no chat to measure; name others, or a longer --window")
        base = None
        base_name = options.divergence_from
        if base_name and (base_name != model.name or model.source.extension):  # else the model is the base
            named = ModelRef(base_name, **vars(model.source.permissions))
            base = load_model(resolve_model(named), model.dtype)

        def score(name: str) -> Json:
            return chat_score(name, chats[name], model, base).model_dump()

        def passes(name: str) -> list[Pass]:
            return [(0, len(chats[name].ids))] * (2 if base else 1)

        about = About("chat", f"{len(chats)} chats", ("limit", len(chats) // 4))
        decided_by = {"rows": table.identity, "base": base and identity_of(base)}
        results = session.map_items(
            model, options, decided_by, items=list(chats), function=score, about=about, passes=passes
        )
        per_chat = [ChatScore.model_validate(result) for result in results]
        tokens = [chat.tokens for chat in per_chat]
        loss = fmean([math.log(chat.perplexity) for chat in per_chat], tokens)
        check_numbers(model, math.isfinite(loss))
        return ChatScores(
            **header_of(model),
            options=options,
            chats=len(chats),
            left_out=sum(number for label, number in counts.items() if label.endswith("left out")),
            tokens=sum(tokens),
            perplexity=math.exp(loss),
            divergence=fmean([chat.divergence for chat in per_chat], tokens) if base_name else None,
            per_chat=per_chat,
        )

    def metrics(self, scores: ChatScores) -> Iterator[Metric]:
        """Yield the perplexity and the divergence with the interval over chats."""
        yield Metric(
            label="chat perplexity",
            value=scores.perplexity,
            higher_is_better=False,
            digits=3,
            values=[Value(chat.name + chat.sha256, chat.perplexity, chat.tokens) for chat in scores.per_chat],
            is_ratio=True,
            dataset=scores.options.data,
            hub_name="perplexity",
        )
        if scores.divergence is None:
            return
        yield average(
            label="chat KL divergence from the base",
            mean=scores.divergence,
            values=[Value(chat.name + chat.sha256, chat.divergence, chat.tokens) for chat in scores.per_chat],
            digits=3,
            higher_is_better=False,
            dataset=scores.options.data,
            hub_name="KL divergence",
        )


def chats_of(options: ChatOptions) -> Source:
    """Return the chats that options name, as a source."""
    return Source(name=options.data, column=options.column, split=options.split)


def vocabulary_of(model: ModelSource) -> tuple[Json, int]:
    """Return the tokens of a model and the number of its logits."""
    return model.tokenizer.get_vocab(), model.config["vocab_size"]


@torch.no_grad()
def chat_score(name: str, chat: Labelled, model: LoadedModel, base: LoadedModel | None) -> ChatScore:
    """Measure the assistant's tokens of a chat, and compare the model with the `base`, if any."""
    positions = [position for position, is_scored in enumerate(chat.loss_mask) if is_scored and position > 0]
    ids = pad_rows(model.module, [chat.ids])
    parts = split_positions(model.module, ids, positions)
    modules = [model.module] if base is None else [model.module, base.module]
    logits_by_model = [logits_in_parts(module, ids, parts) for module in modules]

    def sums_of(part: torch.Tensor, *part_logits: torch.Tensor) -> tuple[float, float]:
        log_probs = [logits[0].float().log_softmax(dim=-1) for logits in part_logits]  # (positions, vocabulary)
        of_model, of_base = log_probs[0], log_probs[-1]
        loss = -of_model.gather(1, ids[0, part, None]).double().sum().item()
        divergences = kl_div(of_model, of_base, log_target=True, reduction="none").sum(dim=1)
        return loss, divergences.double().sum().item()

    # A loop over `zip` would hold the logits of a part while those of the next are computed.
    losses, divergences = zip(*map(sums_of, parts, *logits_by_model), strict=True)
    return ChatScore(
        name=name,
        sha256=digest_of(list(chat.ids)),
        tokens=len(positions),
        perplexity=math.exp(sum(losses) / len(positions)),
        divergence=sum(divergences) / len(positions),
    )
