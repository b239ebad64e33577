"""The tables of the use of context, from the results of use_context.py."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean

import record
from experiment import CONTROL
from pages import machines_of, mean_and_range, table
from pi_lora.evaluation.chat import Chats
from pi_lora.evaluation.context import Context, ContextScores
from pi_lora.evaluation.intervals import Pairs, of_means
from pi_lora.report.comparison import Comparison
from tables_smollm2 import as_percent, change_in_percent, outcomes_of, retrieved, validation_perplexity
from use_context import RATES, SEEDS

SMOLLM2 = {
    "base": "base",
    "untuned": "YaRN, untuned",
    "released": "released: YaRN, PoSE sequences of 1,024",
    "whole": "YaRN, whole sequences",
    "chosen": "documents by gain, aggregation tasks (left out of the package)",
    "weighted": "LongCE (left out of the package)",
    CONTROL: "control: whole sequences of 8,192",
    "evaluator": "Gemma 3 270M, the evaluator",
}
# Rows that were tuned with several seeds.
SEEDED = ("whole", CONTROL)
# Tokens of context that a base with a window of 8,192 tokens is measured with.
NEAR = "last 6k-8k tokens"
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


def names_of(row: str) -> list[str]:
    """The names of the results of a row, a seed each.

    >>> names_of("base"), names_of("whole")
    (['base'], ['whole', 'whole seed 1', 'whole seed 2'])
    """
    further = [f"{row} seed {seed}" for seed in SEEDS]
    return [row, *further] if row in SEEDED else [row]


def of_row(results: str, row: str, text: str) -> list[ContextScores]:
    """The scores of a row, a seed each."""
    return [scores_of(results, name, text) for name in names_of(row)]


def perplexities(seeds: Sequence[ContextScores]) -> list[str]:
    """Perplexity with the last tokens and with the whole window, and LongPPL with both: the mean and range of seeds."""
    columns = zip(*map(_perplexities, seeds), strict=True)
    return [mean_and_range(values, style) for values, style in zip(columns, (".2f", ".2f", ".1f", ".1f"), strict=True)]


def _perplexities(scores: ContextScores) -> tuple[float, float, float, float]:
    gain, _, long_whole, long_near = Context().metrics(scores)
    documents = scores.per_document
    loss = fmean([document.loss for document in documents], [document.tokens for document in documents])
    return math.exp(loss + gain.value), math.exp(loss), long_near.value, long_whole.value


def key_gain(seeds: Sequence[ContextScores]) -> str:
    """The gain of key tokens in nats: of one seed with the interval over documents, of several mean and range."""
    gains = []
    for scores in seeds:
        _, _, long_whole, long_near = Context().metrics(scores)
        gains.append(math.log(long_near.value / long_whole.value))
    if len(seeds) > 1:
        return mean_and_range(gains, ".1f")
    pairs = []
    for document in scores.per_document:
        if document.key_gain is not None:
            pairs.append((0.0, document.key_gain, float(document.key_tokens)))
    return with_interval(gains[0], [pairs], ".1f")


def with_interval(value: float, pairs: Sequence[Pairs], style: str) -> str:
    """A number with the interval of the mean difference over documents."""
    bounds = [format(bound, style) for bound in of_means(pairs) or ()]
    return f"{value:{style}} ({' to '.join(bounds)})"


def vs_untuned(scores: ContextScores, untuned: ContextScores) -> str:
    """The nats by which the key tokens are predicted better than untuned, with the interval over documents."""
    pairs = []
    for before, after in zip(untuned.per_document, scores.per_document, strict=True):
        if before.key_loss is not None and after.key_loss is not None:
            pairs.append((after.key_loss, before.key_loss, float(after.key_tokens)))
    gain = fmean([before - after for after, before, _ in pairs], [weight for *_, weight in pairs])
    return with_interval(gain, [pairs], "+.2f")


def vs_control(scores: ContextScores, control: ContextScores) -> Pairs:
    """The losses by document: of the control with the last tokens, and with the whole window; and the tokens."""
    losses = []
    for before, after in zip(control.per_document, scores.per_document, strict=True):
        near = before.loss + before.gain
        losses.append((near, after.loss, float(after.tokens)))
    return losses


def control_of(row: str) -> str:
    """The control of the same seed.

    >>> control_of("whole seed 2"), control_of("released")
    ('control seed 2', 'control')
    """
    _, seed, number = row.partition(" seed ")
    return f"{CONTROL}{seed}{number}"


def change_of(row: str, text: str) -> str:
    """The change from the control with the last tokens to a row with the whole window: of one seed with the interval
    over documents, of several mean and range, each paired with the control of its seed.
    """
    pairs = []
    for name in names_of(row):
        control = scores_of("use_context", control_of(name), text)
        pairs.append(vs_control(scores_of("use_context", name, text), control))
    if len(pairs) == 1:
        return change_in_percent(pairs[0])
    changes = [as_percent(losses) for losses in pairs]
    return f"{fmean(changes):+.1f} % ({min(changes):+.1f} to {max(changes):+.1f})"


def passkeys(row: str) -> str:
    """The passkeys that were retrieved: of one seed with the interval over passkeys, of several mean and range."""
    names = [f"use_context/passkey-{name}" for name in names_of(row)]
    if len(names) == 1:
        return retrieved(names[0])
    counts = [sum(outcomes_of(name)) for name in names]
    if not any(counts):
        return f"0 of {len(outcomes_of(names[0]))}"
    mean = f"{fmean(counts):.0f} of {len(outcomes_of(names[0]))}"
    return f"{mean} ({min(counts):.0f} to {max(counts):.0f})"


def key_tokens(scores: ContextScores) -> int:
    """The number of key tokens."""
    return sum(document.key_tokens for document in scores.per_document)


def amounts(scores: ContextScores) -> str:
    """The sample: documents, and key tokens among the tokens that are scored."""
    tokens = sum(document.tokens for document in scores.per_document)
    return f"{scores.documents} documents; {key_tokens(scores)} key tokens of {tokens:,} scored tokens"


def readme() -> Iterator[str]:
    """Five rows for the README, and where they were measured."""
    rows = []
    for row in IN_README:
        seeds = of_row("use_context", row, "novels")
        rows.append((SMOLLM2[row], len(seeds), *perplexities(seeds), passkeys(row)))
    head = ("model", "seeds", f"perplexity, {NEAR}", "16k", f"key tokens, {NEAR}", "16k", "passkeys at 16k")
    yield from table(head, rows)
    [control, *_] = of_row("use_context", CONTROL, "novels")
    yield f"\n{amounts(control)}. Three seeds: mean and range. One seed: 95 % interval over passkeys."
    yield from machines_of(record.read("use_context/machines"))


def smollm2() -> Iterator[str]:
    """All rows on novels and on mathematics; the seeds of the whole sequences; what became of chats."""
    for text in ("novels", "mathematics"):
        rows = []
        for row, label in SMOLLM2.items():
            seeds = of_row("use_context", row, text)
            change = "" if row == "evaluator" else change_of(row, text)
            cells = [label, len(seeds), *perplexities(seeds), key_gain(seeds), change]
            if text == "novels":
                cells.append(passkeys(row))
            rows.append(cells)
        head = [
            text,
            "seeds",
            f"perplexity, {NEAR}",
            "16k",
            f"LongPPL, {NEAR}",
            "16k",
            "gain of key tokens, nats",
            "vs. control, change",
        ]
        if text == "novels":
            head.append("passkeys")
        yield from table(head, rows)
        [control, *_] = of_row("use_context", CONTROL, text)
        of_evaluator = key_tokens(seeds[0])
        yield (
            f"\n{amounts(control)}. Three seeds: mean and range. One seed: 95 % intervals over documents, or over "
            f"passkeys. The evaluator has another tokenizer, and {of_evaluator} key tokens in the same texts.\n"
        )
    yield from by_seed()
    for row, chats in zip(("whole", "released", CONTROL), record.read_scores(CHATS), strict=True):
        _, divergence, *_ = Chats().metrics(chats)
        yield f"{chats.chats} chats, {SMOLLM2[row]}: KL divergence from the base {divergence.text} nats per token.\n"
    yield from machines_of(record.read("use_context/machines"))


def by_seed() -> Iterator[str]:
    """The tuned rows seed by seed: the change from the control of that seed, key tokens and passkeys."""
    rows = []
    for row in ("released", "whole"):
        for seed, name in enumerate(names_of(row)):
            cells = [SMOLLM2[row], seed]
            for text in ("novels", "mathematics"):
                read = partial(scores_of, "use_context", text=text)
                scores = read(row=name)
                cells += [
                    change_in_percent(vs_control(scores, read(row=control_of(name)))),
                    vs_untuned(scores, read(row="untuned")),
                ]
            rows.append((*cells, retrieved(f"use_context/passkey-{name}")))
    of_text = [f"{text}: {what}" for text in ("novels", "mathematics") for what in ("vs. control", "key tokens, nats")]
    yield from table(("tuned", "seed", *of_text, "passkeys"), rows)
    yield (
        "\n`vs. control`: perplexity of all tokens with 16k, compared with the control of that seed with the "
        f"{NEAR}. `key tokens`: nats better than untuned YaRN, both with 16k. 95 % intervals over documents, or over "
        "passkeys.\n"
    )


def gemma3() -> Iterator[str]:
    """The rows of Gemma 3, and the table of `pi-lora compare`."""
    rows = []
    for row, label in GEMMA3.items():
        scores = scores_of("gemma3_64k", row, "novels")
        rows.append((label, *perplexities([scores])))
    near = "last 24k-32k tokens"
    head = ("Gemma 3 270M", f"perplexity, {near}", "64k", f"LongPPL, {near}", "64k")
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
