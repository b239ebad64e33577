"""Divisors of the rotary frequencies that `pi-lora search` finds, beside the untuned scalings: perplexity in both
windows and passkeys, on documents and passkeys that the search did not see.

    python benchmarks/search.py builtin
    python scripts/fetch_model.py smollm2_135m_instruct
    python benchmarks/search.py smollm2

The built-in model is searched at 1,024 tokens on the first twelve documents, and measured on eleven others that the
seed draws, none of the twelve. SmolLM2 is searched at 16,384 tokens on the validation novels of experiment.py,
and measured on the test novels and with the passkeys of use_context.py, as the rows that are known already. A command
whose result exists is left out. A processor without fast bfloat16 measures in float32.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import record  # first: it finds scripts/
from experiment import BASE, BOOKS, ORIGINAL, TARGET, run_missing, score
from pages import machines_of, table
from pi_lora.models.device import has_fast_bfloat16
from pi_lora.report.comparison import compare
from record import parser_of
from shown import by_novel, change_text, read_scores

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


SETTINGS = {
    "builtin": Setting(
        model="builtin:tiny",
        target=1024,
        dtype="float32",
        search="--minutes 3",
        perplexity="--documents 11 --seed 4154 --windows 256,1024 --truncate 2048",
        passkey="--depths 8 --trials 10 --seed 12",
    ),
    "smollm2": Setting(
        model=BASE,
        target=TARGET,
        dtype="bfloat16",
        search=f"--minutes 30 --data {BOOKS}/validation",
        perplexity=f"--data {BOOKS}/test --windows {ORIGINAL},{TARGET} --truncate {TARGET} --stride {ORIGINAL}",
        passkey="--depths 8 --trials 5 --seed 11",
    ),
}
# Rows that another script measured in the same way.
KNOWN = {
    ("smollm2", "perplexity", "base"): "smollm2_16k/perplexity-test-base",
    ("smollm2", "perplexity", YARN): "smollm2_16k/perplexity-test-untuned-yarn",
    ("smollm2", "perplexity", "theta"): "smollm2_16k/perplexity-test-untuned-theta",
    ("smollm2", "passkey", "base"): "use_context/passkey-base",
    ("smollm2", "passkey", YARN): "use_context/passkey-untuned",
}


def commands(name: str) -> Iterator[str]:
    """Yield the commands in order."""
    setting = SETTINGS[name]
    dtype = setting.dtype if has_fast_bfloat16() else "float32"
    file = RESULTS / f"{name}.json"
    at_target = f"{setting.model} --target {setting.target}"
    # One document is left out of the search: the rows below test it on other text.
    yield f"search {at_target} {setting.search} --documents 1 --dtype {dtype} --output {file}"
    # The divisors first.
    for row in (FOUND, *ROWS[:-1]):
        model = f"{at_target} --scaling {row}"
        models = {"perplexity": model, "passkey": model}
        if row == "base":
            models = {"perplexity": setting.model, "passkey": at_target}
        if row == FOUND:
            models = dict.fromkeys(models, f"{model} --factors {file}")
        for measurement, model in models.items():
            if (name, measurement, row) not in KNOWN and row not in REMOVED:
                options = getattr(setting, measurement)
                yield score(measurement, row, model, options, results=RESULTS / name, dtype=dtype)


def scores_of(name: str, measurement: str, row: str) -> Any:
    """The scores of a row; of documents of novels, with one value for every novel."""
    file = KNOWN.get((name, measurement, row), f"search/{name}/{measurement}-{row}")
    [scores] = read_scores(file)
    if measurement == "perplexity" and name == "smollm2":
        return by_novel(scores)
    return scores


def cells(name: str, row: str) -> dict[str, str]:
    """By heading the dtype, the perplexity in both windows and the share of passkeys, with the change from those of
    YaRN.
    """
    texts = {}
    for measurement in ("perplexity", "passkey"):
        yarn = scores_of(name, measurement, YARN)
        scores = scores_of(name, measurement, row)
        texts["dtype"] = scores.dtype
        for change in compare(yarn, scores):
            if change.unit != "tokens":
                texts[change.measurement] = f"{change.run:.2f}"
                if row != YARN:
                    texts[change.measurement] += f"; {change_text(change)}"
    return texts


def tables() -> Iterator[str]:
    """A table for each model that was searched, a scaling a row; the search, and the machines."""
    for name, setting in SETTINGS.items():
        rows = {row: cells(name, row) for row in ROWS}
        yield from table((setting.model, *rows[YARN]), [(row, *texts.values()) for row, texts in rows.items()])
        found = record.read(f"search/{name}")
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
