"""Recipe to run folder: the story of a training."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from pi_lora.data.batches import TrainingData, training_data
from pi_lora.distributed import is_leader, join_processes, number_of_processes, wait_for_all
from pi_lora.errors import Interrupted
from pi_lora.models.adapter import (
    prepare_for_tuning,
    save_adapter,
    save_full,
    train_in_float32,
    trainable_parameters,
    tune_further,
    without_known_warnings,
)
from pi_lora.models.attention import attention_kernel
from pi_lora.models.base import (
    Placement,
    device,
    dtype_named,
    load_model,
    load_tokenizer,
    quiet_loading,
    save_config,
    save_tokenizer,
)
from pi_lora.models.load import LoadedModel
from pi_lora.preflight import Checked, check
from pi_lora.recipe.schema import Recipe, Tuning
from pi_lora.report.card import write_card
from pi_lora.run_folder import (
    CHECKPOINTS,
    TRAINING_LOG,
    last_checkpoint,
    read_training_log,
    staged,
    staging_path,
    write_provenance,
    write_recipe,
)
from pi_lora.training.log import TrainingLog, ends_after_the_step
from pi_lora.training.scores import TrainingScores
from pi_lora.training.trainer import computes_in_bfloat16, make_trainer
from pi_lora.types import Progress


def train(recipe: Recipe, output: Path, resume: bool = False, progress: Progress | None = None) -> Path:
    """Stretch the base model of `recipe` to its target window, tune it, and save the run whole, or not at all.

    `progress` is called with the step, the number of steps, and a line about the loss and speed.

    Raises:
        PiLoraError: mistakes in the recipe's model, data, hardware or output, before any training; nothing is left.
        Interrupted: SIGINT or SIGTERM came; a checkpoint was written and `resume` goes on from it.
        Diverged: the loss is no longer a finite number.
    """
    checked = check(recipe, output, resume)
    join_processes(cpu=device().type == "cpu")
    config = checked.config
    tokenizer = load_tokenizer(checked.base.path, checked.target)
    data = prepare_data(recipe, checked, progress)
    with _staged_by_the_leader(output, resume) as staging:
        if is_leader():
            write_recipe(staging, recipe)
        set_seed(recipe.training.seed)
        tuned = _prepared(recipe, checked)
        log = TrainingLog(staging, _tokens_per_step(recipe, data), progress)
        loaded = LoadedModel(str(output), tuned, tokenizer, config)
        scores = [TrainingScores(recipe.evaluation, loaded, staging, log)] if recipe.evaluation.every else []
        with quiet_loading(), without_known_warnings(), ends_after_the_step(log):
            trainer = make_trainer(recipe, tuned, tokenizer, data, output.name, staging, log, scores)
            train_in_float32(tuned)
            start = last_checkpoint(staging) if resume else None
            trainer.train(resume_from_checkpoint=str(start) if start else None)
        if log.stopped:
            raise Interrupted(f"{output}: interrupted after step {log.step}, a checkpoint is kept; go on with --resume")
        _save(trainer, recipe.tuning, staging)
        if is_leader():
            save_config(config, staging)
            save_tokenizer(tokenizer, staging)
            last = read_training_log(staging / TRAINING_LOG)[-1]
            facts = {
                "original": checked.original,
                "trainable_parameters": trainable_parameters(tuned),
                "attention": _attention(recipe),
            }
            write_provenance(staging, {**facts, **last})
            write_card(staging)
            shutil.rmtree(staging / CHECKPOINTS, ignore_errors=True)
    return output


def prepare_data(recipe: Recipe, checked: Checked, progress: Progress | None = None) -> TrainingData:
    """The packed sequences or the examples of a recipe; made once, then read from the cache.

    Raises:
        DataError: a source cannot be read, or holds too little.
    """
    tokenizer = load_tokenizer(checked.base.path, checked.target)
    target = recipe.context.target
    return training_data(recipe.data, recipe.training, tokenizer, checked.original, target, progress)


@contextmanager
def _staged_by_the_leader(output: Path, resume: bool) -> Iterator[Path]:
    """`staged`, once for all processes; several machines need an `output` that they share."""
    if not is_leader():
        wait_for_all()
        yield staging_path(output)
        return
    with staged(output, resume) as staging:
        wait_for_all()
        yield staging


def _prepared(recipe: Recipe, checked: Checked) -> Any:
    """The model with what trains, which is a new adapter, every weight, or the adapter that the recipe starts from."""
    place = _placement(recipe.tuning)
    model = load_model(checked.base, checked.config, _dtype(recipe), _attention(recipe), place)
    if checked.adapter is not None:
        return tune_further(model, checked.adapter, recipe.tuning)
    return prepare_for_tuning(model, recipe.tuning, recipe.model.name, recipe.model.revision)


def _attention(recipe: Recipe) -> str:
    in_bfloat16 = computes_in_bfloat16(recipe.training)
    return attention_kernel(recipe.model.attention, in_bfloat16, recipe.hardware.context_parallel)


def _tokens_per_step(recipe: Recipe, data: TrainingData) -> int | None:
    return data.tokens_per_row and data.tokens_per_row * recipe.training.global_batch_size


def _placement(tuning: Tuning) -> Placement:
    """Quantized models are copied to every process; others are spread over them by FSDP, from the host's memory."""
    if tuning.method == "qlora":
        return "quantized"
    return "host" if number_of_processes() > 1 else "device"


def _dtype(recipe: Recipe) -> torch.dtype:
    """Float32 master weights where every weight trains, else a bfloat16 base under the float32 adapter.

    A base that is only read, on a CPU, is float32 as well: without hardware for bfloat16 that is faster.
    """
    if recipe.model.dtype:
        return dtype_named(recipe.model.dtype)
    if recipe.tuning.method == "qlora":
        return torch.bfloat16
    return torch.float32 if recipe.tuning.method == "full" or device().type == "cpu" else torch.bfloat16


def _save(trainer: Any, tuning: Tuning, folder: Path) -> None:
    # Gathering what FSDP has spread takes every process; writing it takes one.
    weights = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
    if not is_leader():
        return
    if tuning.method == "full":
        save_full(trainer.model, folder, weights)
    else:
        save_adapter(trainer.model, folder, weights)
