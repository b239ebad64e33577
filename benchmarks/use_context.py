"""Does SmolLM2-135M-Instruct use 16k tokens after tuning on whole sequences? docs/experiments.md has the plan.

    python scripts/fetch_model.py smollm2_135m_instruct
    python scripts/fetch_model.py gemma3_270m
    python benchmarks/use_context.py smollm2
    python benchmarks/use_context.py gemma3

The second is Gemma 3 270M from 32k to 64k: untuned scalings, and the road from `probe` to `merge`. The novels are those
of experiment.py, and math/ holds long LaTeX files. The experiment is a list of `pi-lora` commands. A command whose
result exists is left out.
"""

from collections.abc import Iterator
from pathlib import Path

import record  # noqa: F401  first: it finds scripts/
from experiment import (
    BASE,
    BOOKS,
    CONTROL,
    ORIGINAL,
    TARGET,
    extension,
    run_missing,
    score,
    to_target,
    training,
    untuned,
)
from record import parser_of

SEEDS = (1, 2)
RELEASED = "adapters/smollm2_135m_16k"
GEMMA = "models/gemma3_270m"
# As chats.py makes them.
CHATS = "chats/test.jsonl"
# The documents of a text, three windows of a novel and one of mathematics.
TEXTS = {"novels": f"{BOOKS}/test/*[0-9].txt --truncate {3 * TARGET}", "mathematics": f"math --truncate {TARGET}"}
# The rates that were tried, of the control the first three, and those that validation chose.
RATES = ("1e-3", "2e-3", "4e-3", "8e-3")
CHOSEN_RATES = {"whole": "1e-3", CONTROL: "2e-3"}
SMOLLM2 = f"--window {TARGET} --short-window 6144 --stride 2048 --documents 10 --seed 0"
GEMMA_ORIGINAL = 32768
GEMMA_TARGET = 65536
GEMMA_STRIDE = 8192
RESULTS = Path("benchmarks/results/use_context")
RUNS = Path("adapters/use_context")
GEMMA_RESULTS = Path("benchmarks/results/gemma3_64k")
GEMMA_RUNS = Path("adapters/gemma3_64k")


def context(row: str, model: str, text: str, options: str, results: Path) -> str:
    """Return the command that measures the use of context on a text, on the key tokens of the evaluator."""
    if row != "evaluator":
        options += f" --key-tokens {results}/context-evaluator-{text}.json"
    return score("context", f"{row} {text}", model, options, results=results)


def tuning(name: str, rate: str, seed: int = 0) -> str:
    """Return the command that tunes on whole sequences."""
    scaling = "yarn"
    sequences = 1
    if name.startswith(CONTROL):
        scaling = CONTROL
        sequences = TARGET // ORIGINAL
    keys = (
        f"model.name={BASE} {extension(scaling)} training.global_batch_size={sequences} "
        f"data.positions=contiguous data.sequence_tokens=null data.seed={seed} training.seed={seed} "
        f"training.steps=26 training.learning_rate={rate} training.warmup_steps=2 "
        "training.precision=bfloat16 training.log_every=1 training.save_every=1000"
    )
    return training(RUNS / name, keys)


def commands() -> Iterator[str]:
    """Yield the commands of SmolLM2: the rates, the runs at the best ones, and the tests."""
    for row, rates in {"whole": RATES, CONTROL: RATES[:3]}.items():
        window = ORIGINAL if row == CONTROL else TARGET
        for rate in rates:
            name = f"{row}_{rate}"
            yield tuning(name, rate)
            options = f"--data {BOOKS}/validation --truncate {TARGET} --windows {window} --stride {window}"
            yield score("perplexity", f"validation {name}", f"{RUNS}/{name}", options, results=RESULTS)
    models = {"base": BASE, "untuned": untuned("yarn"), "released": RELEASED}
    for row, rate in CHOSEN_RATES.items():
        yield tuning(row, rate)
        models[row] = f"{RUNS}/{row}"
        for seed in SEEDS:
            yield tuning(f"{row}_{seed}", rate, seed)
            models[f"{row} seed {seed}"] = f"{RUNS}/{row}_{seed}"
    for row, model in {"evaluator": GEMMA, **models}.items():
        for text, documents in TEXTS.items():
            yield context(row, model, text, f"--data {documents} {SMOLLM2}", RESULTS)
    for row, model in models.items():
        at_target = to_target(model, TARGET)
        yield score("passkey", row, at_target, "--depths 8 --trials 5 --seed 11", results=RESULTS)
    talking = f"{RUNS}/whole {RELEASED} {RUNS}/{CONTROL}"
    yield score("chat", "whole released control", talking, f"--data {CHATS} --divergence-from {BASE}", results=RESULTS)


def road() -> Iterator[str]:
    """Yield the commands of a user with Gemma 3 and novels, and the use of context under untuned scalings."""
    to_extend = f"{GEMMA} --target {GEMMA_TARGET}"
    recipe = f"{GEMMA_RESULTS}/recipe.yaml"
    run = f"{GEMMA_RUNS}/road"
    # Fewer prompts and passes than `new` asks for.
    fewer = f'evaluation.passkey={{"depths":8,"trials":3}} evaluation.perplexity.stride={GEMMA_STRIDE}'
    yield f"probe {to_extend} --data {BOOKS}/validation --documents 1 --trials 3 --json {GEMMA_RESULTS}/probe.json"
    yield f"new {to_extend} --data {BOOKS}/train --gpu 80GB --output {recipe}"
    yield f"train {recipe} {fewer} --output {run}"
    yield f"compare {GEMMA} {run} --dtype bfloat16 --json {GEMMA_RESULTS}/compare.json"
    yield f"merge {run} --check logits --output {GEMMA_RUNS}/merged"
    scalings = {"evaluator": "pi", "yarn": "yarn", "theta": "theta"}
    rows = {row: untuned(scaling, GEMMA, GEMMA_ORIGINAL, GEMMA_TARGET) for row, scaling in scalings.items()}
    options = (
        f"--data {BOOKS}/test/*[0-9].txt --truncate {GEMMA_TARGET} --window {GEMMA_TARGET} --short-window 24576 "
        f"--stride {GEMMA_STRIDE} --documents 7 --seed 0"
    )
    for row, model in {**rows, "base": GEMMA, "tuned": run}.items():
        yield context(row, model, "novels", options, GEMMA_RESULTS)


EXPERIMENTS = {"smollm2": commands, "gemma3": road}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", choices=EXPERIMENTS)
    run_missing(EXPERIMENTS[parser.parse_args().model]())


if __name__ == "__main__":
    main()
