"""Recipe to run folder: the only home of TRL."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, set_seed

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports usage otherwise

from trl import SFTConfig, SFTTrainer

from pi_lora.adapter import prepare_for_tuning, save_adapter, trainable_parameters, without_known_warnings
from pi_lora.data.packing import training_sequences
from pi_lora.errors import Interrupted
from pi_lora.model import (
    BaseModel,
    device,
    dtype_named,
    extended_config,
    find_base,
    has_fast_bfloat16,
    load_model,
    load_tokenizer,
    save_config,
    save_tokenizer,
)
from pi_lora.recipe.schema import Recipe, Training, Tuning
from pi_lora.rope import Interpolation
from pi_lora.run import (
    CHECKPOINTS,
    check_output,
    last_checkpoint,
    staged,
    write_card,
    write_provenance,
)
from pi_lora.training_log import TRAINING_LOG, Progress, TrainingLog, ends_after_the_step, read_training_log


def train(recipe: Recipe, output: Path, resume: bool = False, progress: Progress | None = None) -> Path:
    """Stretch the base model of `recipe` to its target window, tune it, and save the run whole, or not at all.

    `progress` is called with the step, the number of steps, and a line about the loss and speed.

    Raises:
        PiLoraError: a mistake in the recipe's model, data or output, before any training; nothing is left behind.
        Interrupted: SIGINT or SIGTERM came; a checkpoint was written and `--resume` goes on from it.
    """
    base, interpolation = _base_of(recipe)
    config = extended_config(base, interpolation)
    tokenizer = load_tokenizer(base.path, interpolation.target)
    training = recipe.training
    data = training_sequences(recipe.data, tokenizer, interpolation.target, training.steps * training.global_batch_size)
    with staged(output, resume) as staging:
        set_seed(training.seed)
        tuned = prepare_for_tuning(load_model(base, config, _dtype(recipe)), recipe.tuning, recipe.model.name)
        log = TrainingLog(staging, training.global_batch_size * interpolation.target, progress)
        with without_known_warnings(), ends_after_the_step(log):
            trainer = _Trainer(
                training,
                model=tuned,
                args=_trainer_arguments(training, staging),
                train_dataset=data,
                processing_class=tokenizer,
                callbacks=[log],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train(resume_from_checkpoint=str(last_checkpoint(staging)) if resume else None)
        if log.interrupted and log.step < training.steps:
            raise Interrupted(f"{output}: interrupted after step {log.step}, a checkpoint is kept; go on with --resume")
        _save(tuned, recipe.tuning, staging)
        save_config(config, staging)
        save_tokenizer(tokenizer, staging)
        if not training.save_every:
            shutil.rmtree(staging / CHECKPOINTS, ignore_errors=True)
        facts = {"trainable_parameters": trainable_parameters(tuned), **read_training_log(staging / TRAINING_LOG)[-1]}
        write_card(staging, recipe, interpolation)
        write_provenance(staging, recipe, facts)
    return output


def check(recipe: Recipe, output: Path, resume: bool = False) -> str:
    """What `train` is about to do, in a line, after all that can be checked before any weights are read.

    Raises:
        PiLoraError: the model, its scaling or the output folder will not do.
    """
    base, interpolation = _base_of(recipe)
    extended_config(base, interpolation)
    check_output(output, resume)
    training, tokens = recipe.training, recipe.training.global_batch_size * interpolation.target
    return (
        f"{base.name}: {interpolation.original} to {interpolation.target} tokens, {recipe.scaling}, "
        f"{recipe.tuning.method}; "
        f"{training.steps} steps of {tokens:,} tokens at {training.learning_rate:g}; to {output}"
    )


def rate_share(training: Training) -> Callable[[int], float]:
    """The share of the maximum rate at each step: linear warm-up from `warmup_start` (paper.tex, section 3.1), then
    constant, or falling to zero along a line or a half cosine.

    >>> rate = rate_share(Training(steps=100, schedule="constant", warmup_steps=20, warmup_start=0.1))
    >>> [round(rate(step), 3) for step in (0, 10, 20, 99)]
    [0.1, 0.55, 1.0, 1.0]
    """

    def share(step: int) -> float:
        if step < training.warmup_steps:
            return training.warmup_start + (1 - training.warmup_start) * step / training.warmup_steps
        done = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
        return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[training.schedule]

    return share


def _base_of(recipe: Recipe) -> tuple[BaseModel, Interpolation]:
    base = find_base(recipe.model.name, recipe.model.revision, recipe.model.trust_remote_code)
    return base, base.interpolation(recipe.scaling, recipe.context.target, recipe.context.original)


class _Trainer(SFTTrainer):
    """SFTTrainer with the paper's schedule, whose warm-up does not begin at zero."""

    def __init__(self, training: Training, **arguments: Any) -> None:
        self.training = training
        super().__init__(**arguments)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, rate_share(self.training))
        return self.lr_scheduler


def _trainer_arguments(training: Training, staging: Path) -> SFTConfig:
    bfloat16 = training.precision == "bfloat16" or (training.precision == "auto" and has_fast_bfloat16())
    return SFTConfig(
        output_dir=str(staging / CHECKPOINTS),
        max_steps=training.steps,
        learning_rate=training.learning_rate,
        per_device_train_batch_size=training.per_device_batch_size,
        gradient_accumulation_steps=training.global_batch_size // training.per_device_batch_size,
        weight_decay=training.weight_decay,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        bf16=bfloat16,
        use_cpu=device().type == "cpu",
        gradient_checkpointing=training.activation_checkpointing,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps" if training.save_every else "no",
        save_steps=training.save_every or training.steps,
        seed=training.seed,
        data_seed=training.seed,
        report_to="none",
        disable_tqdm=True,
    )


def _dtype(recipe: Recipe) -> torch.dtype:
    """Float32 master weights where every weight trains or on a CPU, else a bfloat16 base under the float32 adapter."""
    if recipe.model.dtype:
        return dtype_named(recipe.model.dtype)
    return torch.float32 if recipe.tuning.method == "full" or device().type == "cpu" else torch.bfloat16


def _save(model: Any, tuning: Tuning, folder: Path) -> None:
    if tuning.method == "full":
        model.save_pretrained(folder)
    else:
        save_adapter(model, folder)
