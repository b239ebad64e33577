"""LoRA on the built-in model side by side, on a CPU: by modules, scaling and positions. `make reproduce NAME=methods`.

    python scripts/compare_methods.py

For each method the learning rate is chosen first: that of the lowest perplexity at the target on validation documents,
with one seed, among rates twice as far apart until the best is neither the first nor the last. Then three seeds with
that rate, and every scaling without tuning, are measured on test documents. Runs stay in `comparison/` and scores in
benchmarks/results/methods/, and the command goes on where it was interrupted. `python benchmarks/tables.py` writes the
tables in benchmarks/results/methods.md.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from arguments import parser_of, train_words
from pi_lora.api import evaluate, load
from pi_lora.model_ref import ModelRef
from pi_lora.scaling.extension import Extension

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
from machine import machine  # noqa: E402
from record import read, write  # noqa: E402

RECIPE = ROOT / "recipes" / "demo.yaml"
RUNS = Path("comparison")
# As many as `make demo` trains.
STEPS = 100
TARGET = 1024
# Of the test; rates are chosen at the target alone.
WINDOWS = (256, 512, TARGET)
DEPTHS = 32
TRIALS = 10
SEEDS = 3
# The rates that are tried first for every method.
RATES = (2.5e-3, 5e-3, 1e-2)
# The documents by which rates are chosen, and those that are reported.
VALIDATION = "validation"
TEST = "test"

# Labels, and models.
UNTUNED = {"not-tuned": ("not tuned", ModelRef("builtin:tiny"))}
for scaling in ("pi", "yarn", "llama3", "theta", "dynamic"):
    extended = ModelRef("builtin:tiny", extension=Extension(TARGET, scaling=scaling))
    UNTUNED[f"not-tuned-{scaling}"] = (f"not tuned, scaling: {scaling}", extended)
# Label, and how a row differs from recipes/demo.yaml, which trains embeddings and norms with LoRA, and scales by PI.
LORA = "tuning.modules_to_save=nothing"
METHODS: dict[str, tuple[str, list[str]]] = {
    "lora": ("lora", [LORA]),
    "lora-embeddings": ("lora, embeddings and norms", []),
    "direct": ("lora, scaling: direct", [LORA, "scaling=direct"]),
    "yarn": ("lora, scaling: yarn", [LORA, "scaling=yarn"]),
    "pose": ("lora, positions: pose", [LORA, "data.positions=pose"]),
    "pose-yarn": ("lora, scaling: yarn, positions: pose", [LORA, "scaling=yarn", "data.positions=pose"]),
}


def tuned(name: str, rate: float, seed: int, split: str) -> dict[str, Any]:
    """The scores of a method with a rate and a seed, tuned first where no run did that."""
    run = RUNS / f"{name}-{rate:g}-{seed}"
    if not read(f"methods/{run.name}-{split}") and not run.exists():
        # The same arithmetic on every processor, so that rows of two of them compare.
        schedule = (
            f"training.steps={STEPS} training.precision=float32 training.learning_rate={rate:g} "
            f"training.seed={seed} data.seed={seed}"
        )
        _, changes = METHODS[name]
        words = train_words(str(RECIPE), run, *changes, *schedule.split())
        subprocess.run([sys.executable, "-m", "pi_lora", *words], check=True)
    return measured(run.name, ModelRef(run), split)


def measured(row: str, model: ModelRef, split: str) -> dict[str, Any]:
    """The scores of a model on the documents of a split, kept as those of a row with the machine."""
    name = f"methods/{row}-{split}"
    kept: dict[str, Any] = read(name)
    if kept:
        return kept
    loaded = load(model)
    windows = WINDOWS if split == TEST else (TARGET,)
    perplexity = evaluate(loaded, "perplexity", windows=windows, stride=256, documents=12, truncate=4096, split=split)
    scores: dict[str, Any] = {
        "perplexity": {str(window.window): window.perplexity for window in perplexity.windows},
        "machine": machine(),
    }
    if split == TEST:
        passkey = evaluate(loaded, "passkey", target=TARGET, depths=DEPTHS, trials=TRIALS, seed=2)
        scores["k_max"] = passkey.k_max
        scores["success_rate"] = fmean(depth.success_rate for depth in passkey.depths)
    write(name, scores)
    return scores


def best_rate(score: Callable[[float], float]) -> float:
    """The rate with the lowest score. While the best is the first or the last, a further one is tried.

    >>> best_rate(lambda rate: abs(rate - 6e-4))
    0.000625
    """
    rates = list(RATES)
    while True:
        best = min(rates, key=score)
        if best == rates[0]:
            rates.insert(0, best / 2)
        elif best == rates[-1]:
            rates.append(2 * best)
        else:
            return best


def validation_perplexity(name: str, rate: float) -> float:
    """The perplexity at the target that chooses the rate of a method."""
    perplexities = tuned(name, rate, 0, VALIDATION)["perplexity"]
    return float(perplexities[str(TARGET)])


def main() -> None:
    parser_of(__doc__).parse_args()
    for row, (_, model) in UNTUNED.items():
        measured(row, model, TEST)
    for name in METHODS:
        rate = best_rate(partial(validation_perplexity, name))
        for seed in range(SEEDS):
            tuned(name, rate, seed, TEST)


if __name__ == "__main__":
    main()
