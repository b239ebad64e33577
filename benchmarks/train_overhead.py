"""The cost of `pi-lora train` over a bare SFTTrainer: tokens a second of both, in turns, in one run.

    python benchmarks/train_overhead.py [--recipe demo] [--name NAME] [--steps 60] [--warm 10] [key=value ...]

`model.name=models/gpt_oss_random` is made when it is missing: gpt-oss with 4 small layers and random weights.
The bare script is what TRL's documentation would have one write: the same model, adapter, sequences and settings, no
more. Each turn is a process of its own; the first steps, `--warm`, are not counted. JSON goes to benchmarks/results/.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from plan_memory import GPT_OSS, random_model
from record import apart, parser_of, training_log, write_row

RANDOM = Path("models/gpt_oss_random")
ROUNDS = 3


def bare(file: Path, changes: list[str], warm: int) -> tuple[float, float]:
    """Tokens a second, and the loss of the first step, of a plain TRL and PEFT script on the model, adapter, sequences
    and settings of a recipe.
    """
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from bare_trl import bare_trainer
    from pi_lora.data.batches import collate, training_data
    from pi_lora.models.resolve import resolve_for_training
    from pi_lora.recipe.files import load_recipe

    transformers.logging.set_verbosity_error()
    recipe = load_recipe(file, changes).recipe
    training = recipe.training
    extended = resolve_for_training(recipe)
    folder = extended.base.path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    original = config.max_position_embeddings
    target = recipe.context.target
    packed = training_data(recipe.data, training, tokenizer, original, target).rows
    config.rope_parameters = extended.config["rope_parameters"]
    ends: dict[int, float] = {}

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends[state.global_step] = time.monotonic()

    saved = None
    if recipe.tuning.modules_to_save != "nothing":
        saved = ["embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"]
    with tempfile.TemporaryDirectory() as output:
        trainer = bare_trainer(
            recipe,
            AutoModelForCausalLM.from_pretrained(folder, config=config, dtype="float32"),
            tokenizer,
            output=output,
            saved=saved,
            train_dataset=packed,
            data_collator=collate,
            callbacks=[Clock()],
        )
        trainer.train()
    tokens = len(packed[0]["input_ids"]) * training.global_batch_size * (training.steps - warm)
    return tokens / (ends[training.steps] - ends[warm]), trainer.state.log_history[0]["loss"]


def ours(given: list[str], warm: int) -> tuple[float, float]:
    """Tokens a second of `pi-lora train`, by its own log, and the loss of the first step."""
    lines = training_log(*given, "training.log_every=1")
    first = lines[warm - 1]
    last = lines[-1]
    tokens = last["tokens"] - first["tokens"]
    seconds = last["seconds"] - first["seconds"]
    return tokens / seconds, lines[0]["loss"]


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
        mine, loss = ours([str(file), *changes], options.warm)
        theirs, bare_loss = apart(bare, file, changes, options.warm)
        speeds = {"pi_lora": round(mine, 1), "bare": round(theirs, 1), "ratio": round(mine / theirs, 4)}
        rounds.append({**speeds, "first_loss": loss, "bare_first_loss": bare_loss})
        print(rounds[-1], flush=True)
    median = statistics.median(each["ratio"] for each in rounds)
    row = {"changes": changes, "rounds": rounds, "median_ratio": median}
    write_row("train_overhead", ("runs", options.name or options.recipe), row)


if __name__ == "__main__":
    main()
