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
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import record  # first: it finds scripts/
from experiment import BASE, BOOKS, Command, run_missing, score
from pages import machines_of, table
from pi_lora.evaluation.suite import MEASUREMENTS
from pi_lora.models.device import has_fast_bfloat16
from pi_lora.report.comparison import compare
from pi_lora.types import Json
from record import parser_of
from tables_smollm2 import by_novel

RESULTS = Path("benchmarks/results/search")
YARN = "yarn"
FOUND = "factors"
ROWS = ("base", YARN, "theta", "llama3", "cope", "drop", FOUND)
# The model, the target in tokens, the dtype, and options of the search, of perplexity and of passkeys.
SETTINGS = {
    "builtin": (
        "builtin:tiny",
        "1024",
        "float32",
        "--minutes 3",
        "--documents 11 --seed 4154 --windows 256,1024 --truncate 2048",
        "--depths 8 --trials 10 --seed 12",
    ),
    "smollm2": (
        BASE,
        "16384",
        "bfloat16",
        f"--minutes 30 --data {BOOKS}/validation",
        f"--data {BOOKS}/test --windows 8192,16384 --truncate 16384 --stride 8192",
        "--depths 8 --trials 5 --seed 11",
    ),
    "smollm2_32k": (
        BASE,
        "32768",
        "bfloat16",
        f"--minutes 30 --data {BOOKS}/validation",
        f"--data {BOOKS}/test --windows 8192,32768 --truncate 32768 --stride 8192",
        "--depths 8 --trials 5 --seed 11",
    ),
    "gemma3_64k": (
        "models/gemma3_270m",
        "65536",
        "bfloat16",
        f"--minutes 30 --data {BOOKS}/validation",
        f"--data {BOOKS}/test --windows 32768,65536 --truncate 65536 --stride 32768",
        "--depths 8 --trials 5 --seed 11",
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


def result_of(name: str, measurement: str, row: str) -> str:
    """Return the name of the file with the scores of a row, in benchmarks/results."""
    return KNOWN.get((name, measurement, row), f"search/{name}/{measurement}-{row}")


def commands(name: str) -> Iterator[Command]:
    """Yield the commands in order."""
    model, target, dtype, searched, text, passkeys = SETTINGS[name]
    if not has_fast_bfloat16():
        dtype = "float32"
    file = RESULTS / f"{name}.json"
    # The rows below are the test of the search.
    words = f"search {model} {searched} --documents 1 --trials 1 --target {target} --dtype {dtype} --output {file}"
    yield file, words.split()
    # The divisors first.
    for row in (FOUND, *ROWS[:-1]):
        measured = partial(score, results=RESULTS / name, dtype=dtype)
        extended = f"{model} --target {target}"
        if row != "base":
            extended += f" --scaling {row}"
        if row == FOUND:
            extended += f" --factors {file}"
        if (name, "perplexity", row) not in KNOWN:
            yield measured("perplexity", row, model if row == "base" else extended, text)
        if (name, "passkey", row) not in KNOWN:
            yield measured("passkey", row, extended, passkeys)


def of_novels(content: Json) -> Json:
    """Perplexities with one value for every novel: two documents of one novel are not independent."""
    values: dict[str, list[Json]] = {}
    for row in content["windows"]:
        for novel, loss in by_novel(content, row["window"]).items():
            value = {"window": row["window"], "perplexity": math.exp(loss), "tokens": row["tokens"]}
            values.setdefault(novel, []).append(value)
    novels = [{"name": novel, "tokens": 0, "windows": windows} for novel, windows in values.items()]
    return {**content, "per_document": novels}


def cells(name: str, row: str) -> dict[str, str]:
    """The perplexity in both windows and the share of passkeys by heading, as far as they are measured: the value, and
    its change from that of YaRN with the paired interval.
    """
    texts = {}
    _, _, dtype, _, text, _ = SETTINGS[name]
    for measurement in ("perplexity", "passkey"):
        contents = [record.read(result_of(name, measurement, each)) for each in (YARN, row)]
        if all(contents):
            if measurement == "perplexity" and str(BOOKS) in text:
                contents = [of_novels(content) for content in contents]
            for change in compare(*map(MEASUREMENTS[measurement].scores.model_validate, contents)):
                if change.unit != "tokens":
                    cell = f"{change.run:.2f}"
                    if change.change:
                        cell += f"; {change.change:+.1f} {change.unit} ({change.interval_text})"
                    if contents[1]["dtype"] != dtype:
                        cell += f" ({contents[1]['dtype']})"
                    texts[change.measurement] = cell
    return texts


def tables(_: Mapping[str, Any]) -> Iterator[str]:
    """A table for each model, a scaling a row; the search, and the machines."""
    for name, (model, *_rest) in SETTINGS.items():
        found = record.read(f"search/{name}")
        measured = {row: texts for row in ROWS if (texts := cells(name, row))}
        if found:
            headings = measured[YARN]
            rows = []
            for row, texts in measured.items():
                cells_of_row = [texts.get(heading, "not measured") for heading in headings]
                rows.append((row, *cells_of_row))
            yield from table((model, *headings), rows)
            cost = f"{found['steps']} steps, {found['options']['minutes']:.0f} minutes"
            yield f"\nPasskeys in %; changes beside untuned YaRN, paired, 95 %. The search: {cost}.\n"
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
