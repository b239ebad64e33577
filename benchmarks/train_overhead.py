"""The cost of `pi-lora train` over a bare SFTTrainer: tokens a second of both, in turns, in one run.

    python benchmarks/train_overhead.py [--recipe demo] [--name NAME] [--steps 60] [--warm 10] [key=value ...]

`model.name=models/gpt_oss_random` is made when it is missing: gpt-oss with 4 small layers and random weights.
The bare script is what TRL's documentation would have one write: the same model, adapter, sequences and settings, no
more. Each turn is a process of its own; the first steps, `--warm`, are not counted. JSON goes to benchmarks/results/.
"""

import statistics
from pathlib import Path

from plan_memory import GPT_OSS, random_model
from record import apart, parser_of, write_row

RANDOM = Path("models/gpt_oss_random")
ROUNDS = 3


def speed(contender: str, file: Path, changes: list[str], warm: int) -> tuple[float, float]:
    """Tokens a second of a contender, and the loss of the first step."""
    import pi_lora
    from contenders import timed, train_with_pi_lora, train_with_trl
    from pi_lora.recipe.files import load_recipe

    train = {"pi_lora": train_with_pi_lora, "bare": train_with_trl}[contender]
    recipe = load_recipe(file, [*changes, "training.log_every=1"]).recipe
    clock = timed(train, recipe, recipe.training.steps)
    tokens = pi_lora.plan(recipe).tokens_per_step * len(clock.seconds[warm:])
    return tokens / sum(clock.seconds[warm:]), clock.losses[0]


def main() -> None:
    from pi_lora.recipe.files import find_recipe

    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--name", help="of the row, if not that of the recipe")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    file = find_recipe(Path(options.recipe))
    changes = [f"training.steps={options.steps}", *options.overrides]
    if f"model.name={RANDOM}" in changes and not RANDOM.exists():
        random_model(RANDOM, GPT_OSS)
    rounds = []
    for _ in range(ROUNDS):
        mine, loss = apart(speed, "pi_lora", file, changes, options.warm)
        bare, bare_loss = apart(speed, "bare", file, changes, options.warm)
        speeds = {"pi_lora": round(mine, 1), "bare": round(bare, 1), "ratio": round(mine / bare, 4)}
        rounds.append({**speeds, "first_loss": loss, "bare_first_loss": bare_loss})
        print(rounds[-1], flush=True)
    median = statistics.median(each["ratio"] for each in rounds)
    row = {"changes": changes, "rounds": rounds, "median_ratio": median}
    write_row("train_overhead", ("runs", options.name or options.recipe), row)


if __name__ == "__main__":
    main()
