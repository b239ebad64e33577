"""Every method side by side on the built-in model, on a CPU: what `make results` runs.

Each row is tuned in a process of its own, so that its peak memory is its own, with the same steps and data; then all
are measured alike. The table goes into docs/results.md, the figures into benchmarks/results/methods.json. What is
finished stays in `comparison/`, and the command goes on where it was interrupted.

    python scripts/compare_methods.py                          # every row, with as many seeds as it has
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

from rich.console import Console

from pi_lora.errors import PiLoraError
from pi_lora.evaluation.passkey.measurement import evaluate_passkey
from pi_lora.evaluation.perplexity.measurement import evaluate_perplexity
from pi_lora.models.model import Extension, Model, load
from pi_lora.recipe.evaluation import PasskeyOptions, PerplexityOptions
from pi_lora.writing import write_json

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from record import machine, read, write  # noqa: E402
from tables import write_pages  # noqa: E402

RUNS = Path("comparison")
STEPS, TARGET, WINDOWS, STRIDE, DEPTHS, TRIALS = 240, 1024, [256, 512, 768, 1024], 128, 32, 10
# The documents and the seed of the passkeys by which settings are chosen, and those that are reported.
VALIDATION, TEST = (
    PerplexityOptions(windows=tuple(WINDOWS), stride=STRIDE, documents=12, truncate=4096, split=split)
    for split in ("validation", "test")
)
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


def scores(loaded: Model, choice: PerplexityOptions) -> dict:
    """What a model has on these documents, and where it was measured."""
    perplexity = evaluate_perplexity(loaded, choice)
    asked = PasskeyOptions(target=TARGET, depths=DEPTHS, trials=TRIALS, seed=PASSKEYS[choice])
    passkey = evaluate_passkey(loaded, asked)
    return {
        "perplexity": {str(row.window): row.perplexity for row in perplexity.windows},
        "k_max": passkey.k_max,
        "success_rate": sum(row.success_rate for row in passkey.depths) / DEPTHS,
        "machine": machine(),
    }


def measured(run: Path, choice: PerplexityOptions) -> dict:
    """The run's results with these documents, which are kept in it."""
    kept = run / f"{choice.split}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    made_with = json.loads((run / "run.json").read_text())
    took = {key: made_with[key] for key in ("trainable_parameters", "seconds", "peak_memory", "tokens")}
    found = scores(load(str(run)), choice) | took
    write_json(kept, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row, with seeds 0, 1, ...")
    parser.add_argument("--rates", default="", metavar="R,R", help="instead: try these learning rates, with one seed")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(METHODS):
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = read("methods")
    found |= {"steps": STEPS, "labels": {name: method.label for name, method in METHODS.items()}}
    for name in options.rows or METHODS:
        method = METHODS[name]
        if isinstance(method, Untuned):
            found["rows"][name] = [scores(load("builtin:tiny", method.stretch), TEST)]
        elif options.rates:
            by_rate = {rate: tuned(name, method, rate) for rate in options.rates.split(",")}
            found["rates"][name] = {rate: measured(run, VALIDATION) for rate, run in by_rate.items()}
        else:
            # Never fewer seeds than the row has.
            seeds = max(options.seeds, len(found["rows"].get(name, ())))
            runs = [tuned(name, method, method.rate, seed) for seed in range(seeds)]
            found["rows"][name] = [measured(run, TEST) for run in runs]
    for kind in ("rows", "rates"):
        found[kind] = {name: found[kind][name] for name in METHODS if name in found[kind]}
    write("methods", found)
    write_pages()


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
