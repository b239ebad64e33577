"""The tables and the picture of SmolLM2 at 16k, from the results of experiment.py."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import record
from experiment import BEST, CONTROL, ORIGINAL, RATES, SHORT_STRIDE, STEPS, TARGET, TRIAL_STEPS
from pages import machines_of, table
from pi_lora.drawing import draw_curves, figure_of, save
from pi_lora.evaluation.intervals import Pairs, of_means, wilson
from pi_lora.evaluation.perplexity import DocumentPerplexity, PerplexityScores
from pi_lora.report.comparison import compare

RESULTS = "smollm2_16k"
MODELS = {
    "base": "base",
    "untuned pi": "PI, untuned",
    "untuned yarn": "YaRN, untuned",
    "untuned theta": "theta, untuned",
    "tuned pi": "PI, tuned",
    "tuned theta": "theta, tuned",
    BEST: "YaRN, tuned: released",
    CONTROL: "control: tuned at 8k",
}
DRAWN = ("base", "untuned pi", "untuned yarn", "tuned pi", BEST, CONTROL)


def scores_by_row(measurement: str, rows: Iterable[str], suffix: str = "") -> dict[str, Any]:
    """The scores of the rows that are measured, in files whose names end with `suffix`."""
    found = {}
    for row in rows:
        for scores in record.read_scores(f"{RESULTS}/{measurement}-{row}{suffix}"):
            found[row] = scores
    return found


def by_novel(scores: PerplexityScores, window: int) -> dict[str, float]:
    """The mean loss of the documents of each novel, which have one length, in nats per token."""
    losses: dict[str, list[float]] = {}
    for document in scores.per_document or ():
        novel = Path(document.name).stem.removesuffix("_half")
        loss = math.log(perplexity_at(document, window))
        losses.setdefault(novel, []).append(loss)
    return {novel: fmean(novel_losses) for novel, novel_losses in losses.items()}


def perplexity_at(scores: PerplexityScores | DocumentPerplexity, window: int) -> float:
    [perplexity] = [row.perplexity for row in scores.windows if row.window == window]
    return perplexity


def change(before: PerplexityScores, after: PerplexityScores) -> str:
    """The change from one model's perplexity at 8k to another's at 16k, on the documents of the first one."""
    names = {document.name for document in before.per_document or ()}
    documents = [document for document in after.per_document or () if document.name in names]
    losses_before = by_novel(before, ORIGINAL)
    losses_after = by_novel(after.model_copy(update={"per_document": documents}), TARGET)
    return change_in_percent([(losses_before[novel], loss, 1.0) for novel, loss in losses_after.items()])


def change_in_percent(losses: Pairs) -> str:
    """The change of the perplexity that belongs to losses in nats before and after, with the interval.

    >>> change_in_percent([(3.0, 2.94, 1.0), (2.3, 2.25, 1.0)])
    '-5.4 % (-11.2 to +0.9)'
    """
    bounds = [f"{100 * math.expm1(nats):+.1f}" for nats in of_means([losses]) or ()]
    return f"{as_percent(losses):+.1f} % ({' to '.join(bounds)})"


def as_percent(losses: Pairs) -> float:
    """The change of the perplexity in percent."""
    changes = [after - before for before, after, _ in losses]
    weights = [weight for *_, weight in losses]
    return 100 * math.expm1(fmean(changes, weights))


def retrieved(name: str) -> str:
    """The passkeys that were retrieved, with the interval."""
    outcomes = outcomes_of(name)
    if not outcomes:
        return "not asked"
    trials = len(outcomes)
    return f"{sum(outcomes)} of {trials} {interval_of(fmean(outcomes), trials)}"


def outcomes_of(name: str) -> list[bool]:
    """Which passkeys were retrieved, at all distances; none if they were not asked."""
    return [outcome for scores in record.read_scores(name) for depth in scores.depths for outcome in depth.outcomes]


def interval_of(share: float, trials: int) -> str:
    """Wilson's interval of a share."""
    low, high = wilson(share, trials)
    return f"({low:.0%} to {high:.0%})"


def tables() -> Iterator[str]:
    """All rows; what a window of 16k gains; RULER; the short benchmarks; what bfloat16 changes; the machines."""
    measured = scores_by_row("perplexity-test", MODELS)
    yield from perplexities(measured)
    yield from with_stride(measured[BEST])
    yield from ruler()
    yield from short_benchmarks()
    yield from float32(measured)
    yield from machines_of(record.read(f"{RESULTS}/machines"))


def perplexities(measured: dict[str, PerplexityScores]) -> Iterator[str]:
    """Perplexity at 8k and 16k, the changes from 8k of the base and of the control, and passkeys, a model a row."""
    cells = []
    for row, scores in measured.items():
        values = [f"{perplexity_at(scores, window):.2f}" for window in (ORIGINAL, TARGET)]
        changes = [change(measured[other], scores) for other in ("base", CONTROL)]
        passkeys = retrieved(f"{RESULTS}/passkey-{row}")
        cells.append((MODELS[row], *values, *changes, passkeys))
    compared = (f"16k vs. {other} at 8k, change" for other in ("base", CONTROL))
    yield from table(("model", "perplexity at 8k", "at 16k", *compared, "passkeys at 16k"), cells)
    novels = by_novel(scores, TARGET)
    yield (
        f"\n{scores.documents} documents of {TARGET:,} tokens from {len(novels)} novels, "
        f"stride {scores.stride:,}, {scores.dtype}; 95 % intervals, paired by novel. One seed of each.\n"
    )


def with_stride(best: PerplexityScores) -> Iterator[str]:
    """The change by a window of 16k from a window of 8k that moves by 2,048 tokens, a model of 8k a row."""
    rows = []
    for row, scores in scores_by_row("perplexity-test", (BEST, CONTROL, "base"), f" stride {SHORT_STRIDE}").items():
        at_original = f"{perplexity_at(scores, ORIGINAL):.2f}"
        rows.append((MODELS[row], at_original, change(scores, best)))
    yield from table(("model", f"at 8k, stride {SHORT_STRIDE:,}", "released adapter at 16k vs. this, change"), rows)
    yield "\nThe beginnings of the ten novels; 95 % intervals, paired by novel.\n"


def card() -> Iterator[str]:
    """For the card of the released adapter: its change from other models by novel, and the passkeys of each."""
    rows = []
    at_8k = (CONTROL, BEST, "base")
    measured = scores_by_row("perplexity-test", MODELS)
    best = measured[BEST]
    untuned = measured["untuned yarn"]
    at_16k = by_novel(best, TARGET)
    losses = [(loss, at_16k[novel], 1.0) for novel, loss in by_novel(untuned, TARGET).items()]
    passkeys = partial("{}/passkey-{}".format, RESULTS)
    rows.append(
        (
            MODELS["untuned yarn"],
            f"{TARGET:,}",
            f"{perplexity_at(untuned, TARGET):.2f}",
            change_in_percent(losses),
            retrieved(passkeys("untuned yarn")),
        )
    )
    for suffix in ("", f" stride {SHORT_STRIDE}"):
        for row, scores in scores_by_row("perplexity-test", at_8k, suffix).items():
            window = f"{ORIGINAL:,}, stride {scores.stride:,}"
            asked = "" if suffix else retrieved(passkeys(row))
            label = "this adapter" if row == BEST else MODELS[row]
            rows.append((label, window, f"{perplexity_at(scores, ORIGINAL):.2f}", change(scores, best), asked))
    head = ("compared with", "window", "perplexity", f"this adapter at {TARGET:,}, change", "passkeys in 16,384 tokens")
    yield from table(head, rows)
    yield (
        "\nOne tuning with one seed; 95 % intervals, paired by novel: ten novels, two documents of each (stride 2,048: "
        "one). The control is the same LoRA on the same text, without scaling, on positions up to 8,192."
    )


def ruler() -> Iterator[str]:
    """The share of the answers, a model a row; first those of the base at 4k that chose the tasks."""
    for row, scores in scores_by_row("ruler", ("base at 4k", *MODELS)).items():
        [length] = scores.lengths
        samples = scores.options.samples
        shares = []
        for name, task in length.tasks.items():
            interval = interval_of(task.score, samples)
            shares.append(f"{name} {task.score:.0%} {interval}")
        yield f"RULER, {MODELS.get(row, row)}, {samples} prompts of a task: {', '.join(shares)}.\n"


def short_benchmarks() -> Iterator[str]:
    """Accuracy of the base and of the best by task, with the paired interval of the change."""
    measured = scores_by_row("benchmarks", ("base", BEST))
    for row in compare(measured["base"], measured[BEST]):
        shares = f"{row.base:.1f} and {row.run:.1f} %"
        yield f"{row.measurement}, 500 questions: {shares}, changed by {row.interval_text}.\n"


def float32(rounded: dict[str, PerplexityScores]) -> Iterator[str]:
    """The change by bfloat16, of the documents that were also measured in float32."""
    for row, scores in scores_by_row("perplexity-test", ("base", BEST), " float32").items():
        in_bfloat16 = by_novel(rounded[row], TARGET)
        for novel, exact in by_novel(scores, TARGET).items():
            difference = in_bfloat16[novel] - exact
            yield f"{MODELS[row]}, {novel}: bfloat16 changes the loss by {difference:+.4f} nats per token.\n"


def validation() -> Iterator[str]:
    """Perplexity of the novels that chose, a scaling a row: untuned, after 32 steps by rate, after all steps."""
    rows = []
    most = max(RATES.values(), key=len)
    for scaling in RATES:
        trials = [f"{scaling}_{rate}" for rate in most]
        names = [f"untuned {scaling}", *trials, f"tuned {scaling}"]
        cells = [validation_perplexity(RESULTS, name) for name in names]
        rows.append((scaling, *cells))
    columns = (f"{TRIAL_STEPS} steps at {rate}" for rate in most)
    yield from table(("", "untuned", *columns, f"{STEPS} steps at the best rate"), rows)


def validation_perplexity(results: str, name: str) -> str:
    """The perplexity of the longest window on the validation novels; empty if it is not measured."""
    measured = record.read_scores(f"{results}/perplexity-validation-{name}")
    if not measured:
        return ""
    [scores] = measured
    return f"{scores.windows[-1].perplexity:.2f}"


def picture(file: Path) -> None:
    """The loss by position, and beside it the part up to the highest point of YaRN without tuning."""
    curves = {}
    for row, scores in scores_by_row("perplexity-test", DRAWN).items():
        curves[MODELS[row]] = [(part.first, part.loss) for part in scores.by_position.bins]
    top = max(loss for _, loss in curves["YaRN, untuned"])
    draw = partial(draw_curves, curves, xlabel="tokens before, in the window", ylabel="loss (nats per token)")
    draw_bottom = partial(draw, ylim=(None, top))
    save(figure_of(draw, draw_bottom, window=ORIGINAL), file)
