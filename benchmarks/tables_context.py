"""The tables of the use of context, from the results of use_context.py."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

import record
from experiment import CONTROL
from pages import machines_of, mean_and_range, table
from pi_lora.evaluation.context import Context, ContextScores
from pi_lora.evaluation.intervals import Pairs, of_means
from pi_lora.report.comparison import Comparison
from shown import changes_table, metrics_table, outcomes_of, read_scores, retrieved
from tables_smollm2 import validation_cells
from use_context import RATES, SEEDS, TEXTS

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


def scores_of(row: str, text: str, results: str = "use_context") -> ContextScores:
    """The scores of a row."""
    scores: ContextScores
    [scores] = read_scores(f"{results}/context-{row}-{text}")
    return scores


def names_of(row: str) -> list[str]:
    """The names of the results of a row, a seed each.

    >>> names_of("base"), names_of("whole")
    (['base'], ['whole', 'whole seed 1', 'whole seed 2'])
    """
    further = [f"{row} seed {seed}" for seed in SEEDS]
    return [row, *further] if row in SEEDED else [row]


def cells_of(row: str, text: str) -> list[object]:
    """The label of a row, how many seeds it has, and their perplexities."""
    seeds = [scores_of(name, text) for name in names_of(row)]
    return [SMOLLM2[row], len(seeds), *perplexities(seeds)]


def perplexities(seeds: Sequence[ContextScores]) -> list[str]:
    """Perplexity with the last tokens and with the whole window, and LongPPL with both: the mean and range of seeds."""
    columns = zip(*map(_perplexities, seeds), strict=True)
    return [mean_and_range(values, style) for values, style in zip(columns, (".2f", ".2f", ".1f", ".1f"), strict=True)]


def _perplexities(scores: ContextScores) -> tuple[float, float, float, float]:
    gain, _, long_whole, long_near = Context().metrics(scores)
    documents = scores.per_document
    loss = fmean([document.loss for document in documents], [document.tokens for document in documents])
    return math.exp(loss + gain.value), math.exp(loss), long_near.value, long_whole.value


def with_interval(pairs: Pairs, shown: Callable[[float], str], unit: str = "") -> str:
    """The mean difference of losses in nats, and the interval over documents."""
    mean = fmean([after - before for before, after, _ in pairs], [weight for *_, weight in pairs])
    low, high = of_means([pairs]) or (mean, mean)
    return f"{shown(mean)}{unit} ({shown(low)} to {shown(high)})"


def in_percent(nats: float) -> str:
    """The change of the perplexity that belongs to a difference in nats."""
    return f"{100 * math.expm1(nats):+.1f}"


def vs_untuned(name: str, text: str) -> Pairs:
    """The nats by which the key tokens are predicted better than untuned, by document."""
    pairs = []
    for before, after in zip(scores_of("untuned", text).per_document, scores_of(name, text).per_document, strict=True):
        if before.key_loss is not None and after.key_loss is not None:
            pairs.append((after.key_loss, before.key_loss, float(after.key_tokens)))
    return pairs


def vs_control(name: str, text: str) -> Pairs:
    """The losses by document: of the control of that seed with the last tokens, and with the whole window."""
    _, seed, number = name.partition(" seed ")
    control = scores_of(f"{CONTROL}{seed}{number}", text)
    pairs = []
    for before, after in zip(control.per_document, scores_of(name, text).per_document, strict=True):
        pairs.append((before.loss + before.gain, after.loss, float(after.tokens)))
    return pairs


def passkeys(row: str) -> str:
    """The passkeys that were retrieved: of one seed with the interval over passkeys, of several mean and range."""
    files = [f"use_context/passkey-{name}" for name in names_of(row)]
    if len(files) == 1:
        return retrieved(files[0])
    outcomes = [outcomes_of(file) for file in files]
    counts = mean_and_range([sum(retrieved_once) for retrieved_once in outcomes], ".0f")
    return f"{counts} of {len(outcomes[0])}"


def heads(metric: str, near: str = "6k-8k", whole: str = "16k") -> tuple[str, str]:
    """The heads of two columns: with the last tokens alone, and with the whole window."""
    return f"{metric}, last {near} tokens", f"{metric}, {whole}"


def amounts(scores: ContextScores) -> str:
    """The sample: documents, and key tokens among the tokens that are scored."""
    tokens = sum(document.tokens for document in scores.per_document)
    return f"{scores.documents} documents; {key_tokens(scores)} key tokens of {tokens:,} scored tokens"


def key_tokens(scores: ContextScores) -> int:
    """The number of key tokens."""
    return sum(document.key_tokens for document in scores.per_document)


def readme() -> Iterator[str]:
    """Five rows for the README, and where they were measured."""
    rows = [(*cells_of(row, "novels"), passkeys(row)) for row in IN_README]
    head = ("model", "seeds", *heads("perplexity"), *heads("key tokens"), "passkeys at 16k")
    yield from table(head, rows)
    sample = amounts(scores_of(CONTROL, "novels"))
    yield f"\n{sample}. Three seeds: mean and range. One seed: 95 % interval over passkeys."
    yield from machines_of(record.read("use_context/machines"))


def smollm2() -> Iterator[str]:
    """All rows on novels and on mathematics; what became of chats."""
    for text in TEXTS:
        rows = [cells_of(row, text) for row in SMOLLM2]
        yield from table((text, "seeds", *heads("perplexity"), *heads("LongPPL")), rows)
        yield (
            f"\n{amounts(scores_of(CONTROL, text))}. Three seeds: mean and range. The evaluator has another tokenizer, "
            f"and {key_tokens(scores_of('evaluator', text))} key tokens in the same texts.\n"
        )
    chats = zip(("whole", "released", CONTROL), read_scores(CHATS), strict=True)
    yield from metrics_table({SMOLLM2[row]: [scores] for row, scores in chats})
    yield "\n32 chats, 95 % intervals.\n"
    yield from machines_of(record.read("use_context/machines"))


def by_seed() -> Iterator[str]:
    """The seeds of all rows of SmolLM2: what they gain, on each text, and passkeys."""
    rows = []
    for row, label in SMOLLM2.items():
        if row == "evaluator":
            continue
        for seed, name in enumerate(names_of(row)):
            cells = [label, seed]
            for text in TEXTS:
                cells.append(with_interval(vs_untuned(name, text), "{:+.2f}".format))
                cells.append(with_interval(vs_control(name, text), in_percent, " %"))
            rows.append((*cells, retrieved(f"use_context/passkey-{name}")))
    columns = [f"{text}: {column}" for text in TEXTS for column in ("vs. untuned", "vs. control")]
    yield from table(("row", "seed", *columns, "passkeys"), rows)
    yield (
        "\n`vs. untuned`: nats by which key tokens are predicted better than by untuned YaRN, both with 16k. "
        "`vs. control`: perplexity of all tokens with 16k, compared with the control of that seed with the "
        f"{NEAR}. 95 % intervals over documents, or over passkeys."
    )


def gemma3() -> Iterator[str]:
    """The rows of Gemma 3, and the table of `pi-lora compare`."""
    measured = {label: scores_of(row, "novels", "gemma3_64k") for row, label in GEMMA3.items()}
    rows = [(label, *perplexities([scores])) for label, scores in measured.items()]
    columns = [*heads("perplexity", "24k-32k", "64k"), *heads("LongPPL", "24k-32k", "64k")]
    yield from table(("Gemma 3 270M", *columns), rows)
    sample = measured["base"]
    yield f"\n{sample.documents} novels, 65,536 tokens of each; {key_tokens(sample)} key tokens of untuned PI.\n"
    comparison = Comparison.model_validate(record.read("gemma3_64k/compare"))
    yield from changes_table("`pi-lora compare`", comparison.rows)
    yield f"\n{comparison.settings['perplexity']}.\n"
    yield from machines_of(record.read("gemma3_64k/machines"))


def validation() -> Iterator[str]:
    """Perplexity of the validation novels, a rate a column."""
    rows = [validation_cells("use_context", name, [f"{name}_{rate}" for rate in RATES]) for name in SEEDED]
    yield from table(("26 steps at", *RATES), rows)
