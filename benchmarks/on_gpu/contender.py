"""One contender in a process of its own: a few steps of one trainer, timed by a callback, then the process ends.

    python contender.py STEPS CONTENDER RECIPE.yaml

pi-lora runs as a user runs it. Whatever trains, transformers' trainer runs it: the clock begins with its first step,
and peak memory counts from there, without loading and quantizing.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

PI_LORA = "pi-lora"
PLAIN = "TRL + PEFT"


def time_the_trainer(steps: int) -> None:
    """Add a callback to every trainer that prints seconds, losses and peaks of `steps` steps and ends the process."""
    import torch
    from transformers import Trainer, TrainerCallback

    on_gpu = torch.cuda.is_available()

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.seconds: list[float] = []
            self.losses: list[float] = []
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self.last = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds.append(now - self.last)
            self.last = now

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            self.losses.append(logs["loss"])
            if state.global_step < steps:
                return
            row: dict[str, Any] = {"step_seconds": self.seconds, "losses": self.losses}
            if on_gpu:
                row["peak_bytes"] = torch.cuda.max_memory_allocated()
                row["reserved_bytes"] = torch.cuda.max_memory_reserved()
            print(json.dumps(row), flush=True)
            os._exit(0)

    train = Trainer.train

    def train_with_clock(trainer: Any, *arguments: Any, **options: Any) -> Any:
        trainer.add_callback(Clock())
        return train(trainer, *arguments, **options)

    Trainer.train = train_with_clock


def train_with_pi_lora(recipe: Path, folder: str) -> None:
    """Run `pi-lora train`."""
    from pi_lora.__main__ import main

    sys.argv = ["pi-lora", "train", str(recipe), "--force", "--output", f"{folder}/run"]
    main()


def train_with_trl(recipe_file: Path, folder: str) -> None:
    """Train as the documentation of TRL and PEFT has it: on the same model, tokens and rank."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from bare_trl import bare_trainer
    from pi_lora.recipe.files import load_recipe

    recipe = load_recipe(recipe_file).recipe
    base = recipe.model.name
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, device_map="auto")
    sizes = (recipe.training.steps, recipe.context.target)
    ids = torch.randint(0, model.config.vocab_size, sizes).tolist()
    bare_trainer(
        recipe,
        model,
        AutoTokenizer.from_pretrained(base),
        output=folder,
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
    ).train()


def main() -> None:
    steps, contender, recipe = sys.argv[1:]
    time_the_trainer(int(steps))
    with tempfile.TemporaryDirectory() as folder:
        if contender == PLAIN:
            train_with_trl(Path(recipe), folder)
        else:
            train_with_pi_lora(Path(recipe), folder)


if __name__ == "__main__":
    main()
