"""Every method side by side on the built-in model, on a CPU: what `make results` runs.

Each row is tuned in a process of its own, so that its peak memory is its own, with the same steps and data; then all
are measured alike. The table goes into docs/results.md, the figures into benchmarks/results/methods.json. What is
finished stays in `comparison/`, and the command goes on where it was interrupted.

    python scripts/compare_methods.py                          # every row, one seed
    python scripts/compare_methods.py skip yarn --seeds 3      # these alone; others stay as in methods.json
"""

import argparse
import json
import logging
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from machine import machine
from pages import write_block
from rich.console import Console

from pi_lora.data.sources import Choice
from pi_lora.errors import PiLoraError
from pi_lora.evaluation.passkey.measure import evaluate_passkey
from pi_lora.evaluation.passkey.prompt import Grid
from pi_lora.evaluation.perplexity.measure import evaluate_perplexity
from pi_lora.files.making import write_whole
from pi_lora.models.load import load
from pi_lora.report.summary import markdown_table

ROOT = Path(__file__).parent.parent
RUNS = Path("comparison")
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "benchmarks" / "results" / "methods.json"
STEPS, TARGET, WINDOWS, STRIDE, DOCUMENTS, DEPTHS, TRIALS = 240, 1024, [256, 512, 768, 1024], 128, 6, 32, 10
# Name, and how it differs from recipes/demo.yaml, which is LoRA on all linear layers with embeddings and norms, PI.
METHODS = {
    "full": ("full", ["tuning.method=full", "training.learning_rate=1e-3"]),
    "lora": ("lora", ["tuning.also_train=nothing"]),
    "lora-norms": ("lora, norms", ["tuning.also_train=norms"]),
    "lora-embeddings": ("lora, embeddings and norms", []),
    "qlora": ("qlora, embeddings and norms", ["tuning.method=qlora"]),
    "skip": ("lora, embeddings and norms, positions: skip", ["data.positions=skip"]),
    "skip-yarn": (
        "lora, embeddings and norms, positions: skip, scaling: yarn",
        ["data.positions=skip", "scaling=yarn"],
    ),
    "direct": ("lora, embeddings and norms, scaling: direct", ["scaling=direct"]),
    "yarn": ("lora, embeddings and norms, scaling: yarn", ["scaling=yarn"]),
}

console = Console(highlight=False)


def tuned(name: str, seed: int) -> Path:
    run = RUNS / (f"{name}-{seed}" if seed else name)
    if not run.exists():
        # The same arithmetic on every processor, so that rows of two of them compare.
        common = [f"training.steps={STEPS}", "training.precision=float32"]
        seeds = [f"training.seed={seed}", f"data.seed={seed}"] if seed else []
        words = ["train", str(ROOT / "recipes" / "demo.yaml"), *common, *METHODS[name][1], *seeds]
        console.print(f"$ pi-lora {' '.join(words)} --output {run}", soft_wrap=True)
        resume = ["--resume"] if (RUNS / f".{run.name}.partial").exists() else []
        subprocess.run([sys.executable, "-m", "pi_lora", *words, "--output", str(run), *resume], check=True)
    return run


def measured(run: Path) -> dict:
    """The run's results, which are kept in it."""
    kept = run / "compared.json"
    if kept.exists():
        return json.loads(kept.read_text())
    loaded = load(str(run))
    perplexity = evaluate_perplexity(loaded, "builtin:stdlib", WINDOWS, STRIDE, Choice(DOCUMENTS))
    passkey = evaluate_passkey(loaded, Grid(TARGET, DEPTHS, TRIALS))
    made_with = json.loads((run / "run.json").read_text())
    found = {
        "perplexity": {str(row.window): row.perplexity for row in perplexity.windows},
        "k_max": passkey.k_max,
        "success_rate": sum(row.success_rate for row in passkey.depths) / DEPTHS,
        **{key: made_with[key] for key in ("trainable_parameters", "seconds", "peak_memory", "tokens")},
        "machine": machine(),
    }
    write_whole(kept, json.dumps(found))
    return found


def mean_and_range(values: list[float], how: str) -> str:
    """The mean, and of several runs the least and the most."""
    mean, *ends = (format(value, how) for value in (fmean(values), min(values), max(values)))
    return f"{mean} ({' to '.join(ends)})" if len(values) > 1 else mean


def table(rows: dict[str, list[dict]]) -> str:
    head = [*(f"ppl {window}" for window in WINDOWS), "k_max", "passkeys", "trainable", "seconds", "peak memory"]
    cells = [
        [
            METHODS[name][0],
            *(mean_and_range([run["perplexity"][str(window)] for run in runs], ".2f") for window in WINDOWS),
            mean_and_range([run["k_max"] for run in runs], ".0f"),
            mean_and_range([run["success_rate"] for run in runs], ".0%"),
            f"{runs[0]['trainable_parameters'] / 1e6:.2f} M",
            f"{fmean(run['seconds'] for run in runs):.0f}",
            f"{max(run['peak_memory'] for run in runs) / 2**30:.2f} GiB",
        ]
        for name, runs in rows.items()
    ]
    return markdown_table(["method", *head], cells)


def note(rows: dict[str, list[dict]]) -> str:
    """How many seeds, and on which machine the rows were made, a line for each."""
    made_on: dict[str, list[str]] = {}
    for name, runs in rows.items():
        here, seeds = runs[-1]["machine"], f"{len(runs)} seeds" if len(runs) > 1 else "one seed"
        on = f"{seeds}; {here['processor']}, {here['cores']} cores; {here['versions']}; {here['date']}"
        made_on.setdefault(on, []).append(METHODS[name][0])
    first, *others = sorted(made_on, key=lambda on: -len(made_on[on]))
    lines = [f"{STEPS} steps each; {first}.", *(f"{'; '.join(made_on[on])}: {on}." for on in others)]
    return "\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row, with seeds 0, 1, ...")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(METHODS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = json.loads(RESULTS.read_text())["rows"] if options.rows else {}
    for name in options.rows or METHODS:
        rows[name] = [measured(tuned(name, seed)) for seed in range(options.seeds)]
        console.print(f"  {name}: {rows[name]}", soft_wrap=True)
        rows = {each: rows[each] for each in METHODS if each in rows}
    RESULTS.write_text(json.dumps({"steps": STEPS, "rows": rows}, indent=2) + "\n")
    write_block(PAGE, "methods", table(rows) + note(rows))
    console.print(table(rows))


if __name__ == "__main__":
    try:
        main()
    except PiLoraError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
