"""Every method side by side on the built-in model, on a CPU: what `make results` runs.

Each row is tuned in a process of its own, so that its peak memory is its own, with the same steps and data; then all
are measured alike. The table goes into docs/results.md, the figures into benchmarks/results/methods.json. What is
finished stays in `comparison/`, and the command goes on where it was interrupted.

    python scripts/compare_methods.py                          # every row, one seed
    python scripts/compare_methods.py skip yarn --seeds 3      # these alone; others stay as in methods.json
    python scripts/compare_methods.py skip yarn --rates 1.25e-3,2.5e-3,5e-3     # choose their rates, by other documents
"""

import argparse
import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from machine import machine
from pages import mean_and_range, write_block
from rich.console import Console

from pi_lora.data.sources import Choice
from pi_lora.errors import PiLoraError
from pi_lora.evaluation.passkey.measure import evaluate_passkey
from pi_lora.evaluation.passkey.prompt import Grid
from pi_lora.evaluation.perplexity.measure import evaluate_perplexity
from pi_lora.models.model import Extension, Model, load
from pi_lora.report.summary import markdown_table
from pi_lora.writing import write_json

ROOT = Path(__file__).parent.parent
RUNS = Path("comparison")
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results" / "methods.json"
STEPS, TARGET, WINDOWS, STRIDE, DEPTHS, TRIALS = 240, 1024, [256, 512, 768, 1024], 128, 32, 10
# The documents and the seed of the passkeys by which settings are chosen, and those that are reported.
VALIDATION, TEST = Choice(12, truncate=4096, split="validation"), Choice(12, truncate=4096, split="test")
PASSKEYS = {VALIDATION: 0, TEST: 2}


@dataclass(frozen=True)
class Method:
    label: str
    words: list[str] = field(default_factory=list)
    rate: str = "2.5e-3"  # of the rates tried, that of the lowest perplexity at the target; where none was, PI's


@dataclass(frozen=True)
class Untuned:
    label: str
    stretch: Extension | None = None


# Name, and how it differs from recipes/demo.yaml, which is LoRA on all linear layers with embeddings and norms, PI.
ALL = "lora, embeddings and norms"
METHODS: dict[str, Method | Untuned] = {
    "base": Untuned("not tuned"),
    "pi-0": Untuned("not tuned, scaling: pi", Extension(TARGET)),
    "yarn-0": Untuned("not tuned, scaling: yarn", Extension(TARGET, scaling="yarn")),
    "full": Method("full", ["tuning.method=full"], "2e-3"),
    "lora": Method("lora", ["tuning.also_train=nothing"]),
    "lora-norms": Method("lora, norms", ["tuning.also_train=norms"]),
    "lora-embeddings": Method(ALL),
    "qlora": Method("qlora, embeddings and norms", ["tuning.method=qlora"]),
    "skip": Method(f"{ALL}, positions: skip", ["data.positions=skip"]),
    "skip-yarn": Method(f"{ALL}, positions: skip, scaling: yarn", ["data.positions=skip", "scaling=yarn"], "3.125e-4"),
    "direct": Method(f"{ALL}, scaling: direct", ["scaling=direct"], "1.25e-3"),
    "yarn": Method(f"{ALL}, scaling: yarn", ["scaling=yarn"], "1.25e-3"),
}

console = Console(highlight=False)


def tuned(name: str, method: Method, rate: str, seed: int = 0) -> Path:
    run = RUNS / f"{name}-{rate}-{seed}"
    if not run.exists():
        # The same arithmetic on every processor, so that rows of two of them compare.
        common = [f"training.steps={STEPS}", "training.precision=float32", f"training.learning_rate={rate}"]
        seeds = [f"training.seed={seed}", f"data.seed={seed}"] if seed else []
        words = ["train", str(ROOT / "recipes" / "demo.yaml"), *common, *method.words, *seeds]
        console.print(f"$ pi-lora {' '.join(words)} --output {run}", soft_wrap=True)
        resume = ["--resume"] if (RUNS / f".{run.name}.partial").exists() else []
        subprocess.run([sys.executable, "-m", "pi_lora", *words, "--output", str(run), *resume], check=True)
    return run


def scores(loaded: Model, choice: Choice) -> dict:
    """What a model has on these documents, and where it was measured."""
    perplexity = evaluate_perplexity(loaded, "builtin:stdlib", WINDOWS, STRIDE, choice)
    passkey = evaluate_passkey(loaded, Grid(TARGET, DEPTHS, TRIALS, PASSKEYS[choice]))
    return {
        "perplexity": {str(row.window): row.perplexity for row in perplexity.windows},
        "k_max": passkey.k_max,
        "success_rate": sum(row.success_rate for row in passkey.depths) / DEPTHS,
        "machine": machine(),
    }


def measured(run: Path, choice: Choice) -> dict:
    """The run's results with these documents, which are kept in it."""
    kept = run / f"{choice.split}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    made_with = json.loads((run / "run.json").read_text())
    took = {key: made_with[key] for key in ("trainable_parameters", "seconds", "peak_memory", "tokens")}
    found = scores(load(str(run)), choice) | took
    write_json(kept, found)
    return found


def table(rows: dict[str, list[dict]]) -> str:
    head = [*(f"ppl {window}" for window in WINDOWS), "k_max", "passkeys", "trainable", "seconds", "peak memory"]
    cells = []
    for name, runs in rows.items():
        cells.append(
            [
                METHODS[name].label,
                *(mean_and_range([run["perplexity"][str(window)] for run in runs], ".2f") for window in WINDOWS),
                mean_and_range([run["k_max"] for run in runs], ".0f"),
                mean_and_range([run["success_rate"] for run in runs], ".0%"),
            ]
        )
        if isinstance(METHODS[name], Untuned):
            cells[-1] += ["", "", ""]
        else:
            cells[-1] += [
                f"{runs[0]['trainable_parameters'] / 1e6:.2f} M",
                f"{fmean(run['seconds'] for run in runs):.0f}",
                f"{max(run['peak_memory'] for run in runs) / 2**30:.2f} GiB",
            ]
    return markdown_table(["method", *head], cells)


def note(rows: dict[str, list[dict]]) -> str:
    """How many seeds, and on which machine the rows were made, a line for each."""
    made_on: dict[str, list[str]] = {}
    for name, runs in rows.items():
        if isinstance(METHODS[name], Untuned):
            continue
        here, seeds = runs[-1]["machine"], f"{len(runs)} seeds" if len(runs) > 1 else "one seed"
        on = f"{seeds}; {here['processor']}, {here['cores']} cores; {here['versions']}; {here['date']}"
        made_on.setdefault(on, []).append(METHODS[name].label)
    first, *others = sorted(made_on, key=lambda on: -len(made_on[on]))
    lines = [f"{STEPS} steps each; {first}.", *(f"{'; '.join(made_on[on])}: {on}." for on in others)]
    return "\n" + "\n".join(lines) + "\n"


def table_of_rates(rates: dict[str, dict[str, dict]]) -> str:
    """Perplexity at the target and passkeys by rate; the lowest perplexity decides."""
    rows = [
        [
            METHODS[name].label,
            rate,
            f"{run['perplexity'][str(TARGET)]:.2f}",
            f"{run['k_max']}",
            f"{run['success_rate']:.0%}",
        ]
        for name, runs in rates.items()
        for rate, run in runs.items()
    ]
    return markdown_table(["method", "rate", f"ppl {TARGET}", "k_max", "passkeys"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row, with seeds 0, 1, ...")
    parser.add_argument("--rates", default="", metavar="R,R", help="instead: try these learning rates, with one seed")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(METHODS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = {"steps": STEPS, "rows": {}, "rates": {}} | json.loads(RESULTS.read_text())
    for name in options.rows or METHODS:
        method = METHODS[name]
        if isinstance(method, Untuned):
            found["rows"][name] = [scores(load("builtin:tiny", method.stretch), TEST)]
        elif options.rates:
            by_rate = {rate: tuned(name, method, rate) for rate in options.rates.split(",")}
            found["rates"][name] = {rate: measured(run, VALIDATION) for rate, run in by_rate.items()}
        else:
            runs = [tuned(name, method, method.rate, seed) for seed in range(options.seeds)]
            found["rows"][name] = [measured(run, TEST) for run in runs]
    for kind in ("rows", "rates"):
        found[kind] = {name: found[kind][name] for name in METHODS if name in found[kind]}
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    tables = {"methods": table(found["rows"]) + note(found["rows"]), "rates": table_of_rates(found["rates"])}
    for name, text in tables.items():
        write_block(PAGE, name, text)
        console.print(text)


if __name__ == "__main__":
    try:
        main()
    except PiLoraError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
    except subprocess.CalledProcessError as failed:  # and said why
        sys.exit(failed.returncode)
    except KeyboardInterrupt:
        sys.exit(130)
