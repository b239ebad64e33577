"""Divisors of the rotary frequencies that `pi-lora search` finds, beside the untuned scalings: perplexity in both
windows and passkeys, on documents and passkeys that the search did not see.

    python benchmarks/search.py builtin
    python scripts/fetch_model.py smollm2_135m_instruct
    python benchmarks/search.py smollm2
    python benchmarks/search.py smollm2_32k    # and gemma3_64k: with a GPU; Gemma 3 270M as models/gemma3_270m

The built-in model is searched at 1,024 tokens on the first twelve documents, and measured on eleven others that the
seed draws, none of the twelve. SmolLM2 is searched at 16,384 tokens on the validation novels of experiment.py,
and measured on the test novels and with the passkeys of use_context.py, as the rows that are known already. So are
SmolLM2 at 32,768 and Gemma 3 270M at 65,536 tokens, which nobody has measured. A command whose result exists is left
out. A processor without fast bfloat16 measures in float32.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import record  # first: it finds scripts/
from experiment import BASE, BOOKS, Command, run_missing, score
from pages import machines_of, table
from pi_lora.evaluation.perplexity import DocumentPerplexity, PerplexityScores, WindowPerplexity
from pi_lora.models.device import has_fast_bfloat16
from pi_lora.report.comparison import compare
from record import parser_of
from tables_smollm2 import by_novel

RESULTS = Path("benchmarks/results/search")
YARN = "yarn"
FOUND = "factors"
# Scalings that the package had until they were measured here: their rows are shown, and not measured again.
REMOVED = ("cope", "drop")
ROWS = ("base", YARN, "theta", "llama3", *REMOVED, FOUND)


class Setting(NamedTuple):
    """A model, the target in tokens, the dtype, and options of the search, of perplexity and of passkeys."""

    model: str
    target: int
    dtype: str
    search: str
    perplexity: str
    passkey: str


def on_novels(model: str, original: int, target: int) -> Setting:
    """A model that is searched on the validation novels and measured on the test novels."""
    return Setting(
        model=model,
        target=target,
        dtype="bfloat16",
        search=f"--minutes 30 --data {BOOKS}/validation",
        perplexity=f"--data {BOOKS}/test --windows {original},{target} --truncate {target} --stride {original}",
        passkey="--depths 8 --trials 5 --seed 11",
    )


SETTINGS = {
    "builtin": Setting(
        model="builtin:tiny",
        target=1024,
        dtype="float32",
        search="--minutes 3",
        perplexity="--documents 11 --seed 4154 --windows 256,1024 --truncate 2048",
        passkey="--depths 8 --trials 10 --seed 12",
    ),
    "smollm2": on_novels(BASE, 8192, 16384),
    "smollm2_32k": on_novels(BASE, 8192, 32768),
    "gemma3_64k": on_novels("models/gemma3_270m", 32768, 65536),
}
# Rows that another script measured in the same way.
KNOWN = {
    ("smollm2", "perplexity", "base"): "smollm2_16k/perplexity-test-base",
    ("smollm2", "perplexity", YARN): "smollm2_16k/perplexity-test-untuned-yarn",
    ("smollm2", "perplexity", "theta"): "smollm2_16k/perplexity-test-untuned-theta",
    ("smollm2", "passkey", "base"): "use_context/passkey-base",
    ("smollm2", "passkey", YARN): "use_context/passkey-untuned",
}


def result_of(name: str, measurement: str, row: str) -> str:
    """Return the name of the file with the scores of a row, in benchmarks/results."""
    return KNOWN.get((name, measurement, row), f"search/{name}/{measurement}-{row}")


def commands(name: str) -> Iterator[Command]:
    """Yield the commands in order."""
    setting = SETTINGS[name]
    dtype = setting.dtype if has_fast_bfloat16() else "float32"
    file = RESULTS / f"{name}.json"
    at_target = f"{setting.model} --target {setting.target}"
    # One document is left out of the search: the rows below test it on other text.
    words = f"search {at_target} {setting.search} --documents 1 --dtype {dtype} --output {file}"
    yield file, words.split()
    # The divisors first.
    for row in (FOUND, *ROWS[:-1]):
        models = {"perplexity": f"{at_target} --scaling {row}", "passkey": f"{at_target} --scaling {row}"}
        if row == "base":
            models = {"perplexity": setting.model, "passkey": at_target}
        for measurement, model in models.items():
            if (name, measurement, row) in KNOWN or row in REMOVED:
                continue
            if row == FOUND:
                model += f" --factors {file}"
            options = getattr(setting, measurement)
            yield score(measurement, row, model, options, results=RESULTS / name, dtype=dtype)


def of_novels(scores: PerplexityScores) -> PerplexityScores:
    """Perplexities with one value for every novel: two documents of one novel are not independent."""
    windows: dict[str, list[WindowPerplexity]] = {}
    for row in scores.windows:
        for novel, loss in by_novel(scores, row.window).items():
            of_novel = WindowPerplexity(window=row.window, perplexity=math.exp(loss), tokens=row.tokens)
            windows.setdefault(novel, []).append(of_novel)
    novels = [DocumentPerplexity(name=novel, tokens=0, windows=rows) for novel, rows in windows.items()]
    return scores.model_copy(update={"per_document": novels})


def scores_of(name: str, measurement: str, row: str) -> list[Any]:
    """The scores of a row, none before they are measured; of documents of novels, with one value for every novel."""
    scores = record.read_scores(result_of(name, measurement, row))
    if measurement == "perplexity" and str(BOOKS) in SETTINGS[name].perplexity:
        return [of_novels(result) for result in scores]
    return scores


def cells(name: str, row: str) -> dict[str, str]:
    """The perplexity in both windows and the share of passkeys by heading, as far as they are measured: the value, and
    its change from that of YaRN with the paired interval.
    """
    texts = {}
    for measurement in ("perplexity", "passkey"):
        both = [*scores_of(name, measurement, YARN), *scores_of(name, measurement, row)]
        if len(both) < 2:
            continue
        for change in compare(*both):
            if change.unit == "tokens":
                continue
            cell = f"{change.run:.2f}"
            if change.change:
                cell += f"; {change.change:+.1f} {change.unit} ({change.interval_text})"
            if both[1].dtype != SETTINGS[name].dtype:
                cell += f" ({both[1].dtype})"
            texts[change.measurement] = cell
    return texts


def tables() -> Iterator[str]:
    """A table for each model that was searched, a scaling a row; the search, and the machines."""
    for name, setting in SETTINGS.items():
        found = record.read(f"search/{name}")
        if not found:
            continue
        headings = cells(name, YARN)
        rows = []
        for row in ROWS:
            texts = cells(name, row)
            rows.append([row, *(texts.get(heading, "not measured") for heading in headings)])
        yield from table((setting.model, *headings), rows)
        cost = f"{found['steps']} steps, {found['options']['minutes']:.0f} minutes"
        yield f"\nPasskeys in %; changes vs. untuned YaRN, paired, 95 %. The search: {cost}.\n"
        yield from machines_of(record.read(f"search/{name}/machines"))
        yield ""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", choices=SETTINGS)
    name = parser.parse_args().model
    (RESULTS / name).mkdir(parents=True, exist_ok=True)
    run_missing(commands(name))


if __name__ == "__main__":
    main()
