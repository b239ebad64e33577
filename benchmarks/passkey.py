"""The cost of a grid of passkeys: pi-lora beside `generate` with a cache and without, on one model, in one run.

    python benchmarks/passkey.py

The model is the demo's run, `demo/live`, if `make demo` has made it, else the built-in model interpolated to 1024
tokens and not tuned. All measure the paper's grid, 32 distances and 10 keys each, within 1024 tokens. Rounds take
turns, and the median counts; `generate` decodes one trial at a time, of which some at every distance are timed and
scaled to all. Its verdicts must be pi-lora's. JSON goes to benchmarks/results/.
"""

import logging
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from record import seconds_of, write_run

import pi_lora
from pi_lora import LoadedModel
from pi_lora.evaluation.measurement import Session
from pi_lora.evaluation.passkey import Passkey, PasskeyScores, PasskeyTest
from pi_lora.recipe.evaluation import PasskeyOptions

GRID = {"target": 1024, "depths": 32, "trials": 10, "seed": 0}
ROUNDS = 3
# Trials at each distance that `generate` is timed on.
TIMED = {"generate_with_cache": 2, "generate_without_cache": 1}


def generate(loaded: Any, outcomes: list[list[bool]], trials: int, use_cache: bool) -> None:
    """Decode `trials` at every distance."""
    from oracle_passkey import generated

    test = PasskeyTest(loaded, GRID["target"], PasskeyOptions(**GRID))
    for depth, expected in enumerate(outcomes):
        prompts = test.trials(depth)[:trials]
        for trial, key, outcome in zip(prompts, test.keys[depth], expected, strict=False):
            answer = generated(loaded.module, loaded.tokenizer, trial, use_cache)
            if (answer == key) != outcome:
                raise SystemExit(f"generate disagrees at k {test.ks[depth]}, key {key}: {answer}")


def measure(loaded: LoadedModel) -> PasskeyScores:
    """Measure the grid by pi-lora."""
    return Passkey().run(loaded, PasskeyOptions(**GRID), Session())


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tuned = Path("demo/live").exists()
    extension = pi_lora.Extension(target=GRID["target"])
    loaded = pi_lora.load("demo/live") if tuned else pi_lora.load("builtin:tiny", extension)
    scores = measure(loaded)
    outcomes = [row.outcomes or [] for row in scores.depths]
    rounds = []
    for _ in range(ROUNDS):
        seconds = {"pi_lora": seconds_of(lambda: measure(loaded))}
        for way, trials in TIMED.items():
            use_cache = way == "generate_with_cache"
            timed = seconds_of(partial(generate, loaded, outcomes, trials, use_cache))
            seconds[way] = timed * GRID["trials"] / trials
        rounded = {way: round(duration, 2) for way, duration in seconds.items()}
        rounds.append(rounded)
        print(rounded, flush=True)
    median = {way: statistics.median(durations[way] for durations in rounds) for way in rounds[0]}
    faster = {f"than_{way}": round(median[way] / median["pi_lora"], 2) for way in TIMED}
    result = {
        "model": loaded.name,
        "tuned": tuned,
        "grid": GRID,
        "k_max": scores.k_max,
        "seconds": median,
        "times_faster": faster,
        "rounds": rounds,
    }
    write_run("passkey", result)
    print(faster)


if __name__ == "__main__":
    main()
