"""Every method side by side on the built-in model, on a CPU: `make reproduce NAME=methods`.

    python scripts/compare_methods.py

For each method the learning rate is chosen first: that of the lowest perplexity at the target on validation documents,
with one seed, among rates twice as far apart until the best is neither the first nor the last. Then three seeds with
that rate, and every scaling without tuning, are measured on test documents. Runs stay in `comparison/` and scores in
benchmarks/results/methods/, and the command goes on where it was interrupted. The tables in docs/results.md and
benchmarks/results/methods.json are written when every row is complete.
"""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arguments import parser_of
from pi_lora.api import load
from pi_lora.evaluation.measurement import Session
from pi_lora.evaluation.passkey import Passkey
from pi_lora.evaluation.perplexity import Perplexity
from pi_lora.recipe.evaluation import PasskeyOptions, PerplexityOptions
from pi_lora.scaling.extension import Extension
from pi_lora.staging import staging_path
from pi_lora.storage import write_json

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from machine import machine  # noqa: E402
from record import RESULTS, write  # noqa: E402
from tables import write_pages  # noqa: E402

RUNS = Path("comparison")
STEPS = 240
TARGET = 1024
WINDOWS = (256, 512, 768, 1024)
STRIDE = 128
DEPTHS = 32
TRIALS = 20
SEEDS = 3
# The rates that are tried first for every method.
RATES = (1.25e-3, 2.5e-3, 5e-3)
# The documents by which rates are chosen, and those that are reported, with passkeys of this seed.
SEED = 2
VALIDATION = PerplexityOptions(
    windows=WINDOWS,
    stride=STRIDE,
    documents=12,
    truncate=4096,
    split="validation",
)
TEST = VALIDATION.model_copy(update={"split": "test"})

ALL = "lora, embeddings and norms"
UNTUNED: dict[str, Extension | None] = {
    "not tuned": None,
    **{f"not tuned, scaling: {name}": Extension(TARGET, scaling=name) for name in ("pi", "yarn", "theta", "dynamic")},
}
# Label, and how a row differs from recipes/demo.yaml: LoRA on all linear layers with embeddings and norms, PI.
METHODS: dict[str, tuple[str, list[str]]] = {
    "full": ("full", ["tuning.method=full"]),
    "lora": ("lora", ["tuning.modules_to_save=nothing"]),
    "lora-norms": ("lora, norms", ["tuning.modules_to_save=norms"]),
    "lora-embeddings": (ALL, []),
    "qlora": ("qlora, embeddings and norms", ["tuning.method=qlora"]),
    "pose": (f"{ALL}, positions: pose", ["data.positions=pose"]),
    "pose-yarn": (f"{ALL}, positions: pose, scaling: yarn", ["data.positions=pose", "scaling=yarn"]),
    **{name: (f"{ALL}, scaling: {name}", [f"scaling={name}"]) for name in ("direct", "yarn", "theta")},
}


# The scores of a model, and the machine that measured them.
Row = dict[str, Any]


def tuned(name: str, rate: float, seed: int, choice: PerplexityOptions) -> Row:
    """The scores of a method with a rate and a seed, tuned first where no run did that."""
    run = RUNS / f"{name}-{rate:g}-{seed}"
    _, changes = METHODS[name]
    # The same arithmetic on every processor, so that rows of two of them compare.
    schedule = f"training.steps={STEPS} training.precision=float32 training.learning_rate={rate:g}"
    seeds = f"training.seed={seed} data.seed={seed}"
    overrides = [*schedule.split(), *changes, *seeds.split()]
    return measured(run.name, choice, lambda: trained(run, overrides))


def trained(run: Path, overrides: list[str]) -> str:
    """Train the demo's recipe with `overrides`, from the last checkpoint if there is one; return the run."""
    if not run.exists():
        words = ["train", str(ROOT / "recipes" / "demo.yaml"), *overrides, "--output", str(run)]
        print("$ pi-lora", *words, flush=True)
        if staging_path(run).exists():
            words.append("--resume")
        subprocess.run([sys.executable, "-m", "pi_lora", *words], check=True)
    return str(run)


def measured(row: str, choice: PerplexityOptions, model: Callable[[], str], stretch: Extension | None = None) -> Row:
    """The scores of a model with these documents, which are kept as those of a row."""
    file = RESULTS / "methods" / f"{row}-{choice.split}.json"
    if file.exists():
        scores: Row = json.loads(file.read_text())
        return scores
    loaded = load(model(), stretch)
    perplexity = Perplexity().run(loaded, choice, Session())
    scores = {
        "perplexity": {str(window.window): window.perplexity for window in perplexity.windows},
        "machine": machine(),
    }
    if choice is TEST:
        options = PasskeyOptions(target=TARGET, depths=DEPTHS, trials=TRIALS, seed=SEED)
        passkey = Passkey().run(loaded, options, Session())
        success_rate = sum(depth.success_rate for depth in passkey.depths) / DEPTHS
        scores |= {"k_max": passkey.k_max, "success_rate": success_rate}
    write_json(file, scores)
    return scores


def rates_of(score: Callable[[float], float]) -> list[float]:
    """The rates that are tried: those of the start, then further ones while the best is the first or the last.

    >>> rates_of(lambda rate: abs(rate - 6e-4))
    [0.0003125, 0.000625, 0.00125, 0.0025, 0.005]
    """
    rates = sorted(RATES)
    while True:
        best = min(rates, key=score)
        if best == rates[0]:
            rates = [best / 2, *rates]
        elif best == rates[-1]:
            rates = [*rates, 2 * best]
        else:
            return rates


def compared(name: str) -> tuple[dict[str, Row], list[Row]]:
    """The validation scores of a method by rate, and the test scores of its seeds with the best rate."""
    tried: dict[float, Row] = {}

    def score(rate: float) -> float:
        if rate not in tried:
            tried[rate] = tuned(name, rate, 0, VALIDATION)
        return float(tried[rate]["perplexity"][str(TARGET)])

    best = min(rates_of(score), key=score)
    runs = [tuned(name, best, seed, TEST) for seed in range(SEEDS)]
    return {f"{rate:g}": tried[rate] for rate in sorted(tried)}, runs


def untuned(label: str) -> Row:
    """The test scores of the built-in model with a scaling and no tuning."""
    return measured(re.sub("[,:]? ", "-", label), TEST, lambda: "builtin:tiny", UNTUNED[label])


def main() -> None:
    parser_of(__doc__).parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    labels: dict[str, str] = {}
    rows: dict[str, list[Row]] = {}
    rates: dict[str, dict[str, Row]] = {}
    for label in UNTUNED:
        labels[label] = label
        rows[label] = [untuned(label)]
    for name, (label, _) in METHODS.items():
        labels[name] = label
        rates[name], rows[name] = compared(name)
    result = {
        "steps": STEPS,
        "depths": DEPTHS,
        "trials": TRIALS,
        "labels": labels,
        "rows": rows,
        "rates": rates,
    }
    write("methods", result)
    write_pages()


if __name__ == "__main__":
    main()
