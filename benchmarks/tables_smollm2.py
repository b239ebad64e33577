"""The tables and the picture of SmolLM2 at 16k, from the results of experiment.py."""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import record
from experiment import AGAIN_IN_FLOAT32, BEST, CONTROL, ORIGINAL, RATES, SHORT_STRIDE, STEPS, TARGET, TRIAL_STEPS
from pages import machines_of, table
from pi_lora.drawing import draw_curves, figure_of, save
from pi_lora.evaluation.changes import Row, change_of
from pi_lora.evaluation.perplexity import PerplexityScores
from pi_lora.evaluation.suite import metrics_of
from pi_lora.report.comparison import compare
from shown import by_novel, change_text, changes_table, perplexity_at, read_scores, retrieved

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
        for scores in read_scores(f"{RESULTS}/{measurement}-{row}{suffix}"):
            found[row] = scores
    return found


def change(before: PerplexityScores, after: PerplexityScores, window: int) -> Row:
    """The change from one model's perplexity at a window to another's at 16k, on the documents of the first one."""
    names = {document.name for document in before.per_document or ()}
    at_target = perplexity_at(by_novel(after, names), TARGET)
    return change_of(perplexity_at(by_novel(before), window), at_target)


def passkeys(row: str) -> str:
    """The passkeys that were retrieved."""
    return retrieved(f"{RESULTS}/passkey-{row}")


def tables() -> Iterator[str]:
    """All rows; what a window of 16k gains; RULER; what bfloat16 changes; the short benchmarks; the machines."""
    yield from perplexities()
    yield from compared()
    yield ""
    yield from ruler()
    yield from float32()
    yield ""
    base, best = scores_by_row("benchmarks", ("base", BEST)).values()
    yield from changes_table("500 questions, released", compare(base, best))
    yield ""
    yield from machines_of(record.read(f"{RESULTS}/machines"))


def perplexities() -> Iterator[str]:
    """Perplexity at 8k and 16k, the changes from 8k of the base and of the control, and passkeys, a model a row."""
    measured = scores_by_row("perplexity-test", MODELS)
    cells = []
    for row, scores in measured.items():
        values = [f"{perplexity_at(scores, window).value:.2f}" for window in (ORIGINAL, TARGET)]
        changes = [change_text(change(measured[other], scores, ORIGINAL)) for other in ("base", CONTROL)]
        cells.append((MODELS[row], *values, *changes, passkeys(row)))
    heads = (f"16k vs. {other} at 8k, change" for other in ("base", CONTROL))
    yield from table(("model", "perplexity at 8k", "at 16k", *heads, "passkeys at 16k"), cells)
    novels = by_novel(scores).per_document or ()
    yield (
        f"\n{scores.documents} documents of {TARGET:,} tokens from {len(novels)} novels, "
        f"stride {scores.stride:,}, {scores.dtype}; 95 % intervals, paired by novel. One seed of each.\n"
    )


def compared() -> Iterator[str]:
    """The change of the released adapter at 16k from other models and windows."""
    released = scores_by_row("perplexity-test", (BEST,))[BEST]
    at_original = (CONTROL, BEST, "base")
    rows = []
    for window, models, suffix in (
        (TARGET, ("untuned yarn",), ""),
        (ORIGINAL, at_original, ""),
        (ORIGINAL, at_original, f" stride {SHORT_STRIDE}"),
    ):
        for row, scores in scores_by_row("perplexity-test", models, suffix).items():
            setting = f"{window:,}, stride {scores.stride:,}"
            perplexity = f"{perplexity_at(scores, window).value:.2f}"
            changed = change_text(change(scores, released, window))
            rows.append((MODELS[row], setting, perplexity, changed, passkeys(row)))
    head = ("compared with", "window", "perplexity", f"released at {TARGET:,}, change", "passkeys in 16,384 tokens")
    yield from table(head, rows)
    yield (
        "\nOne tuning with one seed; 95 % intervals, paired by novel: ten novels, two documents of each (stride 2,048: "
        "one). The control is the same LoRA on the same text, without scaling, on positions up to 8,192."
    )


def ruler() -> Iterator[str]:
    """The share of the answers, a model an item; first those of the base at 4k that chose the tasks."""
    for row, scores in scores_by_row("ruler", ("base at 4k", *MODELS)).items():
        tasks = [f"{metric.heading} {metric.text}" for metric in metrics_of(scores) if not metric.hub_name]
        yield f"- RULER, {MODELS.get(row, row)}, {scores.options.samples} prompts of a task: {', '.join(tasks)}."


def float32() -> Iterator[str]:
    """The change by bfloat16 and the kernel of the experiment, of the documents that were also measured in float32."""
    in_bfloat16 = scores_by_row("perplexity-test", AGAIN_IN_FLOAT32)
    changes = []
    for row, exact in scores_by_row("perplexity-test", in_bfloat16, " float32").items():
        changed = change(exact, in_bfloat16[row], TARGET).change
        changes.append(f"{MODELS[row]} {changed:+.2f} %")
    yield f"- {TARGET:,} tokens of one novel, vs. float32 with pi-lora's kernel or PyTorch's: {'; '.join(changes)}."


def validation() -> Iterator[str]:
    """Perplexity of the novels that chose, a scaling a row: untuned, after 32 steps by rate, after all steps."""
    rows = []
    most = max(RATES.values(), key=len)
    for scaling in RATES:
        trials = [f"{scaling}_{rate}" for rate in most]
        rows.append(validation_cells(RESULTS, scaling, [f"untuned {scaling}", *trials, f"tuned {scaling}"]))
    columns = (f"{TRIAL_STEPS} steps at {rate}" for rate in most)
    yield from table(("", "untuned", *columns, f"{STEPS} steps at the best rate"), rows)


def validation_cells(results: str, label: str, rows: Iterable[str]) -> list[str]:
    """A label, and perplexities of the longest window on the validation novels; empty where none is measured."""
    cells = [label]
    for row in rows:
        measured = read_scores(f"{results}/perplexity-validation-{row}")
        cells.append("".join(f"{scores.windows[-1].perplexity:.2f}" for scores in measured))
    return cells


def picture(file: Path) -> None:
    """The loss by position, and beside it the part up to the highest point of YaRN without tuning."""
    curves = {}
    for row, scores in scores_by_row("perplexity-test", DRAWN).items():
        curves[MODELS[row]] = [(part.first, part.loss) for part in scores.by_position.bins]
    top = max(loss for _, loss in curves["YaRN, untuned"])
    draw = partial(draw_curves, curves, xlabel="tokens before, in the window", ylabel="loss (nats per token)")
    draw_bottom = partial(draw, ylim=(None, top))
    save(figure_of(draw, draw_bottom, window=ORIGINAL), file)
