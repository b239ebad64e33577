"""What a model keeps of its chats: the perplexity of the assistant's turns, and against a base the divergence of the
next-token distributions on them, and how often greedy answers begin alike.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from statistics import fmean

import torch
from torch.nn.functional import kl_div

from pi_lora.data.chats import ChatTemplate
from pi_lora.data.sources import find_table, format_counts
from pi_lora.data.tokens import Labelled
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import check_numbers, in_parts, logits_at, padded
from pi_lora.evaluation.generation import generate_ids
from pi_lora.evaluation.measurement import (
    Measurement,
    Metric,
    Result,
    Scores,
    Session,
    Value,
    average,
    identity_of,
    proportion,
)
from pi_lora.models.model import Model, find
from pi_lora.recipe.evaluation import ChatOptions, Sampling
from pi_lora.recipe.schema import Source
from pi_lora.types import Json

# Tokens of an answer that are compared.
ANSWER = 32


class ChatScore(Result):
    """A chat: the perplexity of the `tokens` of the assistant's turns; KL(base || model) in nats a token, and the share
    of turns where the greedy answers of both models begin with the same 32 tokens.
    """

    name: str
    tokens: int
    perplexity: float
    divergence: float
    equal_answers: float


class ChatScores(Scores):
    """Means over all tokens of the assistant; `equal_answers` is the mean of the chats."""

    measurement = "chat"

    options: ChatOptions
    chats: int
    left_out: int
    tokens: int
    perplexity: float
    divergence: float | None = None
    equal_answers: float | None = None
    per_chat: list[ChatScore]


class Chats(Measurement[ChatOptions, ChatScores]):
    """Chats: what an extension costs a model that people talk to."""

    scores = ChatScores

    def prepare(self, options: ChatOptions, models: Sequence[Model]) -> ChatOptions:
        """Fill in the shortest window of the models and the base."""
        known = [*models, find(options.base, permissions=models[0].permissions)] if options.base else models
        return options.changed(window=options.window or min(model.window for model in known))

    def measure(self, model: Model, options: ChatOptions, session: Session) -> Json:
        """Measure a model, with the base beside it. Raise DataError if the data cannot be read, or no chat fits."""
        source = Source(name=options.data, column=options.column, split=options.split)
        table, counts = find_table(source), Counter[str]()
        rows = table.read([source.column], None)
        read = ChatTemplate(model.tokenizer).chats(rows, options.window or model.window, counts)
        chats = dict(islice(read, options.limit))
        for line in format_counts(counts):
            session.say(f"{options.data}: {line}")
        if not chats:
            raise DataError(f"--data: {options.data}: holds no chat to measure; name others, or a longer --window")
        base = None
        if options.base and (options.base != model.name or model.extension):  # else the model is its own base
            base = find(options.base, permissions=model.permissions).load(model.dtype)
        decided_by = {**options.model_dump(), "rows": table.identity, "base": base and identity_of(base)}
        results = session.measure(
            model, decided_by, list(chats), lambda name: chat_score(model, base, chats[name]) | {"name": name}
        )
        per_chat = [ChatScore(**each) for each in results]
        tokens = [each.tokens for each in per_chat]
        loss = fmean([math.log(each.perplexity) for each in per_chat], tokens)
        check_numbers(model, math.isfinite(loss))
        return {
            "chats": len(chats),
            "left_out": counts.total(),
            "tokens": sum(tokens),
            "perplexity": math.exp(loss),
            "divergence": fmean([each.divergence for each in per_chat], tokens) if options.base else None,
            "equal_answers": fmean(each.equal_answers for each in per_chat) if options.base else None,
            "per_chat": per_chat,
        }

    def metrics(self, scores: ChatScores) -> list[Metric]:
        """Return the perplexity, the divergence with its interval over chats, and the share of equal answers."""
        data, chats = scores.options.data, scores.per_chat
        about: Json = {"dataset": data, "digits": 3, "higher_is_better": False}
        values = [Value(each.name, each.perplexity, each.tokens) for each in chats]
        loss = Metric(
            "chat perplexity", scores.perplexity, values=values, is_ratio=True, hub_name="perplexity", **about
        )
        if scores.divergence is None or scores.equal_answers is None:
            return [loss]
        values = [Value(each.name, each.divergence, each.tokens) for each in chats]
        label = "chat KL divergence from the base"
        divergence = average(label, scores.divergence, values, hub_name="KL divergence", **about)
        values = [Value(each.name, each.equal_answers) for each in chats]
        about = {"values": values, "dataset": data, "hub_name": "equal answers"}
        label = f"chat answers with the base's first {ANSWER} tokens"
        return [loss, divergence, proportion(label, scores.equal_answers, scores.chats, **about)]


@torch.no_grad()
def chat_score(model: Model, base: Model | None, chat: Labelled) -> Json:
    """Measure the assistant's tokens of a chat, against another model if there is a `base`: fields of ChatScore."""
    places = [place for place, loss_mask in enumerate(chat.loss_mask) if loss_mask and place]
    ids = padded(model.model, [chat.ids])
    parts = in_parts(model.model, ids, places)
    models = [each.model for each in (model, base) if each]
    loss = divergence = 0.0
    for part, *logits in zip(parts, *(logits_at(each, ids, parts) for each in models), strict=True):
        logs = [each[0].float().log_softmax(dim=-1) for each in logits]  # (places, vocabulary)
        loss -= logs[0].gather(1, ids[0, part, None]).double().sum().item()
        divergence += kl_div(logs[0], logs[-1], log_target=True, reduction="none").sum(dim=1).double().sum().item()
    turns = [place for place in places if not chat.loss_mask[place - 1]]
    equal = [begins_alike(model, base, chat.ids[:turn]) for turn in turns] if base else [True]
    return {
        "tokens": len(places),
        "perplexity": math.exp(loss / len(places)),
        "divergence": divergence / len(places),
        "equal_answers": fmean(equal),
    }


def begins_alike(model: Model, base: Model, prompt: list[int]) -> bool:
    """Return whether the greedy answers of both to a prompt begin with the same tokens: the base writes them, and one
    forward pass tells whether each is the model's first choice after those before it.
    """
    tokens = min(ANSWER, model.window - len(prompt), base.window - len(prompt))
    [answer] = generate_ids(base, [prompt], Sampling(temperature=0.0, max_new_tokens=tokens))
    ids = padded(model.model, [[*prompt, *answer.tolist()]])
    [logits] = logits_at(model.model, ids, [torch.arange(len(prompt), ids.shape[1], device=ids.device)])
    return bool((logits[0].argmax(dim=-1) == answer).all())
