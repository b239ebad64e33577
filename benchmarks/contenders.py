"""A training by pi-lora, and the one that a script would have without it: as the documentation of TRL and PEFT has it,
and no more. Both are timed by one clock.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer

import pi_lora
from pi_lora.data.batches import collate, training_data
from pi_lora.models.device import has_fast_bfloat16
from pi_lora.models.resolve import resolve_for_training
from pi_lora.recipe.schema import Recipe

ON_GPU = torch.cuda.is_available()


class StepsDone(Exception):
    """Ends a training whose steps are timed."""


class Clock(TrainerCallback):
    """Times steps, and ends the training after the last one; peak memory counts from the first one."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        self.last = now()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.losses.append(logs["loss"])

    def on_step_end(self, *_: Any, **__: Any) -> None:
        ended = now()
        self.seconds.append(ended - self.last)
        self.last = ended
        if len(self.seconds) == self.steps:
            raise StepsDone


def now() -> float:
    """Seconds on a clock, when the device has done its work."""
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(train: Callable[[Recipe, Path], None], recipe: Recipe, steps: int) -> Clock:
    """Train the first steps of a recipe. transformers' trainer runs them, whoever trains."""
    clock = Clock(steps)
    trainer_train = Trainer.train

    def train_with_clock(trainer: Any, *arguments: Any, **options: Any) -> Any:
        trainer.add_callback(clock)
        return trainer_train(trainer, *arguments, **options)

    with tempfile.TemporaryDirectory() as folder, suppress(StepsDone), patch.object(Trainer, "train", train_with_clock):
        train(recipe, Path(folder) / "run")
    return clock


def train_with_pi_lora(recipe: Recipe, output: Path) -> None:
    """Train as `pi-lora train` does."""
    pi_lora.train(recipe, output=output, force=True)


def train_with_trl(recipe: Recipe, output: Path) -> None:
    """Train a LoRA adapter with TRL and PEFT alone, on the model, sequences and settings of a recipe."""
    training = recipe.training
    source = resolve_for_training(recipe)
    folder = source.base.path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    original = config.max_position_embeddings
    config.rope_parameters = source.config["rope_parameters"]
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.bfloat16 if ON_GPU else torch.float32,
        device_map="auto" if ON_GPU else None,
    )
    saved = None
    if recipe.tuning.modules_to_save != "nothing":
        saved = ["embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"]
    SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(output),
            max_steps=training.steps,
            learning_rate=training.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=training.warmup_steps,
            per_device_train_batch_size=training.per_device_batch_size,
            gradient_accumulation_steps=training.global_batch_size // training.per_device_batch_size,
            adam_beta2=training.betas[1],
            bf16=has_fast_bfloat16(),
            use_cpu=not ON_GPU,
            gradient_checkpointing=training.activation_checkpointing is True,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            seed=training.seed,
            logging_steps=1,
            save_steps=training.save_every,
            report_to="none",
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=recipe.tuning.rank,
            lora_alpha=recipe.tuning.lora_alpha,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            modules_to_save=saved,
            ensure_weight_tying=saved is not None,
        ),
        train_dataset=training_data(recipe.data, training, tokenizer, original, recipe.context.target).rows,
        data_collator=collate,
    ).train()
