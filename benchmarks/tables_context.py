"""The tables of the use of context, from the results of use_context.py."""

import math
from collections.abc import Iterator
from statistics import fmean

import record
from experiment import CONTROL
from pages import machines_of, table
from pi_lora.evaluation.chat import Chats
from pi_lora.evaluation.context import Context, ContextScores
from pi_lora.evaluation.intervals import of_means
from pi_lora.report.comparison import Comparison
from tables_smollm2 import change_in_percent, retrieved, validation_perplexity
from use_context import RATES

SMOLLM2 = {
    "base": "base",
    "untuned": "YaRN, untuned",
    "released": "released: YaRN, PoSE sequences of 1,024",
    "whole": "YaRN, whole sequences",
    "whole seed 1": "the same, seed 1",
    "whole seed 2": "the same, seed 2",
    "chosen": "documents by gain, aggregation tasks (left out of the package)",
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


def scores_of(results: str, row: str, text: str) -> ContextScores:
    """The scores of a row."""
    scores: ContextScores
    [scores] = record.read_scores(f"{results}/context-{row}-{text}")
    return scores


def perplexities(scores: ContextScores) -> list[str]:
    """Perplexity with the near context and with the whole window, and LongPPL with both."""
    gain, _, long_whole, long_near = Context().metrics(scores)
    documents = scores.per_document
    loss = fmean([document.loss for document in documents], [document.tokens for document in documents])
    near = math.exp(loss + gain.value)
    return [f"{near:.2f}", f"{math.exp(loss):.2f}", f"{long_near.value:.1f}", f"{long_whole.value:.1f}"]


def key_gain(scores: ContextScores) -> str:
    """The gain of key tokens in nats, with the interval over documents."""
    _, _, long_whole, long_near = Context().metrics(scores)
    gain = math.log(long_near.value / long_whole.value)
    pairs = []
    for document in scores.per_document:
        if document.key_gain is not None:
            pairs.append((0.0, document.key_gain, float(document.key_tokens)))
    bounds = [f"{bound:.1f}" for bound in of_means([pairs]) or ()]
    return f"{gain:.1f} ({' to '.join(bounds)})"


def control_of(row: str) -> str:
    """The control of the same seed.

    >>> control_of("whole seed 2"), control_of("released")
    ('control seed 2', 'control')
    """
    _, seed, number = row.partition(" seed ")
    return f"{CONTROL}{seed}{number}"


def beside_control(scores: ContextScores, control: ContextScores) -> str:
    """The change from the perplexity of the control with the near context to that with the whole window."""
    losses = []
    for before, after in zip(control.per_document, scores.per_document, strict=True):
        near = before.loss + before.gain
        losses.append((near, after.loss, float(after.tokens)))
    return change_in_percent(losses)


def key_tokens(scores: ContextScores) -> int:
    """The number of key tokens."""
    return sum(document.key_tokens for document in scores.per_document)


def readme() -> Iterator[str]:
    """Five rows for the README, and where they were measured."""
    rows = []
    for row in IN_README:
        scores = scores_of("use_context", row, "novels")
        rows.append((SMOLLM2[row], *perplexities(scores), retrieved(f"use_context/passkey-{row}")))
    head = ("model", "perplexity, near context", "16k", "LongPPL, near context", "16k", "passkeys at 16k")
    yield from table(head, rows)
    yield ""
    yield from machines_of(record.read("use_context/machines"))


def smollm2() -> Iterator[str]:
    """All rows on novels and on mathematics."""
    for text in ("novels", "mathematics"):
        rows = []
        for row, label in SMOLLM2.items():
            scores = scores_of("use_context", row, text)
            control = scores_of("use_context", control_of(row), text)
            beside = "" if row == "evaluator" else beside_control(scores, control)
            cells = [label, *perplexities(scores), key_gain(scores), beside]
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
        tokens = sum(document.tokens for document in control.per_document)
        amounts = f"{control.documents} documents, {tokens:,} scored tokens, {key_tokens(control)} key tokens"
        evaluator = f"The evaluator has another tokenizer, and {key_tokens(scores)} key tokens in the same texts"
        yield f"\n{amounts}; 95 % intervals over documents. {evaluator}.\n"
    for row, chats in zip(("whole", "released", CONTROL), record.read_scores(CHATS), strict=True):
        _, divergence, *_ = Chats().metrics(chats)
        yield f"{chats.chats} chats, {SMOLLM2[row]}: KL divergence from the base {divergence.text} nats per token.\n"
    yield from machines_of(record.read("use_context/machines"))


def gemma3() -> Iterator[str]:
    """The rows of Gemma 3, and the table of `pi-lora compare`."""
    rows = []
    for row, label in GEMMA3.items():
        scores = scores_of("gemma3_64k", row, "novels")
        rows.append((label, *perplexities(scores)))
    head = ("Gemma 3 270M", "perplexity, near", "64k", "LongPPL, near", "64k")
    yield from table(head, rows)
    yield f"\n{scores.documents} novels, 65,536 tokens of each; {key_tokens(scores)} key tokens of untuned PI.\n"
    comparison = Comparison.model_validate(record.read("gemma3_64k/compare"))
    rows = []
    for change in comparison.rows:
        values = (f"{value:,.2f}" for value in (change.base, change.run))
        rows.append((change.measurement, *values, change.verdict, change.interval_text))
    yield from table(("`pi-lora compare`", "base", "run", "verdict", "95 % interval"), rows)
    yield f"\n{comparison.settings['perplexity']}.\n"
    yield from machines_of(record.read("gemma3_64k/machines"))


def validation() -> Iterator[str]:
    """Perplexity of the validation novels, a rate a column."""
    rows = []
    for name in ("whole", CONTROL):
        cells = [validation_perplexity("use_context", f"{name}_{rate}") for rate in RATES]
        rows.append((name, *cells))
    yield from table(("26 steps at", *RATES), rows)
