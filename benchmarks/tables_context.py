"""The tables of the use of context, from the results of use_context.py: of the rows that are measured."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import record
from pages import machines_of, table
from pi_lora.evaluation.chat import Chats, ChatScores
from pi_lora.evaluation.intervals import of_means
from pi_lora.report.comparison import Comparison
from tables_smollm2 import change_in_percent, retrieved, validation_perplexity
from use_context import RATES

CONTROL = "control"
SMOLLM2 = {
    "base": "base",
    "untuned": "YaRN, untuned",
    "released": "released: YaRN, PoSE sequences of 1,024",
    "whole": "YaRN, whole sequences",
    "whole seed 1": "the same, seed 1",
    "whole seed 2": "the same, seed 2",
    "chosen": "documents by gain, aggregation tasks",
    "weighted": "LongCE (left out of the package)",
    CONTROL: "control: whole sequences of 8,192",
    f"{CONTROL} seed 1": "the same, seed 1",
    f"{CONTROL} seed 2": "the same, seed 2",
    "evaluator": "Gemma 3 270M, the evaluator",
}
CHATS = "use_context/chat-whole-released-control"
IN_README = ("base", "untuned", "released", "whole", CONTROL)
GEMMA3 = {
    "base": "base",
    "evaluator": "PI, untuned",
    "yarn": "YaRN, untuned",
    "theta": "theta, untuned",
    "tuned": "YaRN, 20 steps of the recipe of `new`",
}

Result = Mapping[str, Any]


def documents_of(results: str, row: str, text: str) -> Sequence[Result]:
    """The scores of the documents of a row."""
    documents: Sequence[Result] = record.read(f"{results}/context-{row}-{text}")["per_document"]
    return documents


def mean(documents: Sequence[Result], field: str, weight: str) -> float:
    """The mean of a field in nats, weighted by the number of tokens."""
    measured = [document for document in documents if document[weight]]
    return fmean((document[field] for document in measured), [document[weight] for document in measured])


def perplexities(documents: Sequence[Result]) -> list[str]:
    """Perplexity with the near context and with the whole window, and LongPPL with both."""
    cells = []
    for loss, gain, weight, style in (("loss", "gain", "tokens", ".2f"), ("key_loss", "key_gain", "key_tokens", ".1f")):
        far = mean(documents, loss, weight)
        near = far + mean(documents, gain, weight)
        cells += [format(math.exp(near), style), format(math.exp(far), style)]
    return cells


def control_of(row: str) -> str:
    """The control of the same seed.

    >>> control_of("whole seed 2"), control_of("released")
    ('control seed 2', 'control')
    """
    _, seed, number = row.partition(" seed ")
    return f"{CONTROL}{seed}{number}"


def beside_control(documents: Sequence[Result], control: Sequence[Result]) -> str:
    """The change from the perplexity of the control with the near context to that with the whole window."""
    losses = []
    for before, after in zip(control, documents, strict=True):
        near = before["loss"] + before["gain"]
        losses.append((near, after["loss"], after["tokens"]))
    return change_in_percent(losses)


def key_gain(documents: Sequence[Result]) -> str:
    """The gain of key tokens in nats, with the interval over documents."""
    pairs = [(0.0, each["key_gain"], each["key_tokens"]) for each in documents if each["key_tokens"]]
    bounds = [f"{bound:.1f}" for bound in of_means([pairs]) or ()]
    return f"{mean(documents, 'key_gain', 'key_tokens'):.1f} ({' to '.join(bounds)})"


def readme(machines: Result) -> Iterator[str]:
    """Five rows for the README, and where they were measured."""
    rows = []
    for row in IN_README:
        documents = documents_of("use_context", row, "novels")
        rows.append((SMOLLM2[row], *perplexities(documents), retrieved(f"use_context/passkey-{row}")))
    head = ("model", "perplexity, near context", "16k", "LongPPL, near context", "16k", "passkeys at 16k")
    yield from table(head, rows)
    yield ""
    yield from machines_of(machines)


def smollm2(machines: Result) -> Iterator[str]:
    """All rows on novels and on mathematics."""
    for text in ("novels", "mathematics"):
        rows = []
        for row, label in SMOLLM2.items():
            documents = documents_of("use_context", row, text)
            control = documents_of("use_context", control_of(row), text)
            beside = "" if row == "evaluator" else beside_control(documents, control)
            cells = [label, *perplexities(documents), key_gain(documents), beside]
            if text == "novels":
                cells.append(retrieved(f"use_context/passkey-{row}"))
            rows.append(cells)
        head = [
            text,
            "perplexity, near",
            "16k",
            "LongPPL, near",
            "16k",
            "gain of key tokens, nats",
            "16k beside the control of that seed, near",
        ]
        if text == "novels":
            head.append("passkeys")
        yield from table(head, rows)
        tokens = sum(document["tokens"] for document in control)
        keys = sum(document["key_tokens"] for document in control)
        own_keys = sum(document["key_tokens"] for document in documents)
        amounts = f"{len(control)} documents, {tokens:,} scored tokens, {keys} key tokens"
        evaluator = f"The evaluator has another tokenizer, and {own_keys} key tokens in the same texts"
        yield f"\n{amounts}; 95 % intervals over documents. {evaluator}.\n"
    for row, content in zip(("whole", "released", CONTROL), record.read_scores(CHATS), strict=True):
        scores = ChatScores.model_validate(content)
        _, divergence, *_ = Chats().metrics(scores)
        yield f"{scores.chats} chats, {SMOLLM2[row]}: KL divergence from the base {divergence.text} nats a token.\n"
    yield from machines_of(machines)


def gemma3(machines: Result) -> Iterator[str]:
    """The rows of Gemma 3, and the table of `pi-lora compare`."""
    rows = []
    for row, label in GEMMA3.items():
        documents = documents_of("gemma3_64k", row, "novels")
        rows.append((label, *perplexities(documents)))
    keys = sum(document["key_tokens"] for document in documents)
    head = ("Gemma 3 270M", "perplexity, near", "64k", "LongPPL, near", "64k")
    yield from table(head, rows)
    yield f"\n{len(documents)} novels, 65,536 tokens of each; {keys} key tokens of untuned PI.\n"
    comparison = Comparison.model_validate(record.read("gemma3_64k/compare"))
    rows = []
    for change in comparison.rows:
        values = (f"{value:,.2f}" for value in (change.base, change.run))
        rows.append((change.measurement, *values, change.verdict, change.interval_text))
    yield from table(("`pi-lora compare`", "base", "run", "verdict", "95 % interval"), rows)
    yield f"\n{comparison.settings['perplexity']}.\n"
    yield from machines_of(machines)


def validation(machines: Result) -> Iterator[str]:
    """Perplexity of the validation novels, a rate a column."""
    rows = []
    for name in ("whole", CONTROL):
        cells = [validation_perplexity("use_context", f"{name}_{rate}") for rate in RATES]
        rows.append((name, *cells))
    yield from table(("26 steps at", *RATES), rows)
