"""Seconds and bytes of training steps: pi-lora's own path, and what every contender is measured by."""

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, set_seed

from on_gpu.setting import Changes, Setting, planned, random_model, work
from pi_lora.data.batches import TrainingData, collate
from pi_lora.models.adapter import prepare_for_tuning, train_in_float32, without_known_warnings
from pi_lora.models.model import find
from pi_lora.models.weights import quiet_loading
from pi_lora.recipe.schema import Recipe
from pi_lora.training.callbacks import TrainingLog
from pi_lora.training.job import Job
from pi_lora.training.training import Trainer

Row = dict[str, Any]
LONG = 32768


class Clock(TrainerCallback):
    """When each step was done on the device."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Wait for the device, and look at the clock."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def steps_at(tokens: int) -> int:
    """One to warm up, and two that count; one where it takes long."""
    return 2 if tokens >= LONG else 3


def ours(setting: Setting, method: str, lengths: list[int], changes: Changes, tell: Callable[[Row], None]) -> None:
    """Tell a row for each length, trained through pi-lora's own trainer; lengths beyond one that does not fit are not
    tried.
    """
    set_seed(0)
    asked = setting.recipe(method, lengths[-1], changes)
    kernel = job_of(asked).attention
    model = random_model(setting, lengths[-1], method, kernel)
    tuned = prepare_for_tuning(model, asked.tuning, setting.name)
    for tokens in lengths:
        recipe = setting.recipe(method, tokens, changes)
        row = (
            about(setting, recipe, "pi-lora", changes)
            | {"attention": kernel}
            | measured(lambda clock, recipe=recipe: train_here(recipe, tuned, clock), recipe, steps_at(tokens))
        )
        tell(row)
        if row.get("out_of_memory"):
            return


def about(setting: Setting, recipe: Recipe, contender: str, changes: Changes | None = None) -> Row:
    """What a row is of, and what the plan says of it."""
    flops = work(setting, recipe)
    return {
        "contender": contender,
        "method": recipe.tuning.method,
        "layers": setting.layers,
        "tokens": recipe.context.target,
        "sequences": recipe.training.global_batch_size,
        "changes": {section: dict(values) for section, values in (changes or {}).items()},
        "flops": {"forward": flops.forward, "recomputation": flops.recomputation, "backward": flops.backward},
        "planned_bytes": planned(setting, recipe).highest,
    }


def measured(train: Callable[[Clock], None], recipe: Recipe, steps: int) -> Row:
    """Seconds a step after the first, tokens a second, and the peak of the allocator; or that memory was too little."""
    clock, on_gpu = Clock(), torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        train(clock)
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    finally:
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    row: Row = {"steps": len(clock.ends)}
    if on_gpu:
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row["reserved_bytes"] = torch.cuda.max_memory_reserved()
    if steps > 1:
        seconds = (clock.ends[-1] - clock.ends[0]) / (steps - 1)
        row["seconds_a_step"] = seconds
        row["tokens_per_second"] = recipe.training.global_batch_size * recipe.context.target / seconds
    return row


def train_here(recipe: Recipe, tuned: Any, clock: Clock, steps: int | None = None) -> None:
    """What `pi_lora.training.training.train` does between loading and saving, on tokens made up here."""
    steps = steps or steps_at(recipe.context.target)
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"steps": steps})})
    with tempfile.TemporaryDirectory() as folder, quiet_loading(), without_known_warnings():
        log = TrainingLog(Path(folder), recipe.training.global_batch_size * recipe.context.target)
        job = job_of(recipe)
        job.data = TrainingData(synthetic(recipe, tuned.config.vocab_size), collate, recipe.context.target, [])
        trainer = Trainer(job, tuned, Path(folder), log, [clock])
        train_in_float32(tuned)
        trainer.train()


def synthetic(recipe: Recipe, vocabulary: int) -> Any:
    """As many sequences of random tokens as the steps take, seeded."""
    from datasets import Dataset

    number = recipe.training.steps * recipe.training.global_batch_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (number, recipe.context.target), generator=generator)
    return Dataset.from_dict({"input_ids": ids.numpy()}).with_format("numpy")


def job_of(recipe: Recipe) -> Job:
    """Return an unchecked job; its tokenizer is the built-in model's, since the tokens are random."""
    return Job(recipe, Path("benchmark"), find("builtin:tiny"), recipe.context.target)
