"""What a grid of passkeys costs: pi-lora beside `generate` with a cache and without, on one model, in one run.

    python benchmarks/passkey.py [MODEL] [--rounds 3]

MODEL is the demo's run, `demo/live`, if `make demo` has made it, else the built-in model interpolated to 1024 tokens
and not tuned. All measure the paper's grid, 32 distances and 10 keys each, within 1024 tokens. Rounds take turns, and
the median counts; `generate` decodes one trial at a time, of which some at every distance are timed and scaled to all.
Its verdicts must be pi-lora's. JSON goes to benchmarks/results/.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pi_lora.evaluation.passkey.measure import evaluate_passkey
from pi_lora.evaluation.passkey.prompt import Grid, Trial, trials_at
from pi_lora.evaluation.results import PasskeyScores
from pi_lora.models.model import Extension, Model, load

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "passkey.json"
GRID = Grid(target=1024, depths=32, trials=10, seed=0)
# Trials at each distance that `generate` is timed on.
WITH_CACHE, WITHOUT_CACHE = 2, 1

sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "evaluation")]


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def generate_seconds(loaded: Model, outcomes: list[list[bool]], per_depth: int, use_cache: bool) -> float:
    """Seconds that the whole grid takes `generate`, from `per_depth` trials at every distance; prompts are at hand."""
    from oracle_passkey import generated

    def trials(depth: int) -> list[Trial]:
        return trials_at(loaded.tokenizer, GRID, depth, range(per_depth))

    at_hand = [(depth, number, trial) for depth in range(GRID.depths) for number, trial in enumerate(trials(depth))]
    started = time.perf_counter()
    for depth, number, trial in at_hand:
        answer = generated(loaded.model, loaded.tokenizer, trial, use_cache)
        if (answer == GRID.keys[depth][number]) != outcomes[depth][number]:
            raise SystemExit(f"generate disagrees at k {GRID.ks[depth]}, trial {number}: {answer}")
    return (time.perf_counter() - started) * GRID.trials / per_depth


def measure(loaded: Model, k_max_only: bool = False) -> PasskeyScores:
    return evaluate_passkey(loaded, GRID, k_max_only=k_max_only)


def one_round(loaded: Model, outcomes: list[list[bool]]) -> dict[str, float]:
    return {
        "pi_lora": seconds_of(lambda: measure(loaded)),
        "pi_lora_k_max_only": seconds_of(lambda: measure(loaded, k_max_only=True)),
        "generate_with_cache": generate_seconds(loaded, outcomes, WITH_CACHE, use_cache=True),
        "generate_without_cache": generate_seconds(loaded, outcomes, WITHOUT_CACHE, use_cache=False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a run, a model folder or builtin:tiny")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from machine import machine

    logging.getLogger("transformers").setLevel(logging.ERROR)
    name = options.model or ("demo/live" if Path("demo/live").exists() else "builtin:tiny")
    loaded = load(name, Extension(GRID.target) if name == "builtin:tiny" else None)
    scores, only = measure(loaded), measure(loaded, k_max_only=True)
    outcomes = [row.outcomes for row in scores.depths]
    rounds = []
    for _ in range(options.rounds):
        rounds.append({what: round(seconds, 2) for what, seconds in one_round(loaded, outcomes).items()})
        print(rounds[-1], flush=True)
    seconds = {what: statistics.median(each[what] for each in rounds) for what in rounds[0]}
    result = {
        "machine": machine(),
        "model": loaded.name,
        "tuned": name != "builtin:tiny",
        "grid": {"target": GRID.target, "depths": GRID.depths, "trials": GRID.trials, "seed": GRID.seed},
        "k_max": {"whole": scores.k_max, "k_max_only": only.k_max},
        "trials_made": {"whole": GRID.depths * GRID.trials, "k_max_only": sum(row.trials for row in only.depths)},
        "trials_timed": {
            "generate_with_cache": GRID.depths * WITH_CACHE,
            "generate_without_cache": GRID.depths * WITHOUT_CACHE,
        },
        "seconds": seconds,
        "times_faster": {
            "than_generate_with_cache": round(seconds["generate_with_cache"] / seconds["pi_lora"], 2),
            "than_generate_without_cache": round(seconds["generate_without_cache"] / seconds["pi_lora"], 2),
            "k_max_only_than_whole": round(seconds["pi_lora"] / seconds["pi_lora_k_max_only"], 2),
        },
        "rounds": rounds,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["times_faster"], indent=2), RESULTS, sep="\n")


if __name__ == "__main__":
    main()
