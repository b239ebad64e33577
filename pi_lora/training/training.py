"""Job to run folder: the story of a training."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import set_seed

import pi_lora.run_folder as run_folder
from pi_lora.distributed import is_leader, join_processes, number_of_processes, wait_for_all
from pi_lora.errors import Interrupted
from pi_lora.models import adapter as adapters
from pi_lora.models.base import Placement, device, load_model, quiet_loading, save_config, save_tokenizer
from pi_lora.models.load import LoadedModel
from pi_lora.report.card import write_card
from pi_lora.training.job import Job
from pi_lora.training.log import TrainingLog, ends_after_the_step
from pi_lora.training.scores import TrainingScores
from pi_lora.training.trainer import make_trainer
from pi_lora.types import Progress, silent


def train(job: Job, progress: Progress = silent) -> Path:
    """Extend the base model of `job` to its target window, tune it, and save the run whole or not at all. `progress` is
    called with the step, the number of steps, and a line about the loss and speed.
    """
    join_processes(cpu=device().type == "cpu")
    data = job.prepare(progress)
    with _staged_by_the_leader(job) as staging:
        if is_leader():
            run_folder.write_recipe(staging, job.recipe)
        set_seed(job.recipe.training.seed)
        model = _prepared_model(job)
        per_step = data.tokens_per_row and data.tokens_per_row * job.recipe.training.global_batch_size
        log = TrainingLog(staging, per_step, progress)
        loaded = LoadedModel(str(job.output), model, job.tokenizer, job.config)
        scores = [TrainingScores(job.recipe.evaluation, loaded, staging, log)] if job.recipe.evaluation.every else []
        with quiet_loading(), adapters.without_known_warnings(), ends_after_the_step(log):
            trainer = make_trainer(job, model, staging, log, scores)
            adapters.train_in_float32(model)
            start = run_folder.last_checkpoint(staging) if job.resume else None
            trainer.train(resume_from_checkpoint=str(start) if start else None)
        if log.stopped:
            kept = f"interrupted after step {log.step}, a checkpoint is kept"
            raise Interrupted(f"{job.output}: {kept}; continue with --resume")
        _save_weights(job, trainer, staging)
        if is_leader():
            save_config(job.config, staging)
            save_tokenizer(job.tokenizer, staging)
            facts = {
                "original": job.original,
                "trainable_parameters": adapters.trainable_parameters(model),
                "attention": job.attention,
                **run_folder.read_training_log(staging / run_folder.TRAINING_LOG)[-1],
            }
            run_folder.write_provenance(staging, facts)
            write_card(staging)
            shutil.rmtree(staging / run_folder.CHECKPOINTS, ignore_errors=True)
    return job.output


@contextmanager
def _staged_by_the_leader(job: Job) -> Iterator[Path]:
    """`staged`, once for all processes; several machines need an output folder that they share."""
    if not is_leader():
        wait_for_all()
        yield run_folder.staging_path(job.output)
        return
    with run_folder.staged(job.output, job.resume) as staging:
        wait_for_all()
        yield staging


def _prepared_model(job: Job) -> Any:
    recipe = job.recipe
    # A quantized model is copied to every process; others are spread over them by FSDP, from host memory.
    place: Placement = "device" if number_of_processes() == 1 else "host"
    place = "quantized" if recipe.tuning.method == "qlora" else place
    model = load_model(job.base, job.config, job.dtype, job.attention, place)
    if job.adapter is not None:
        return adapters.tune_further(model, job.adapter, recipe.tuning)
    return adapters.prepare_for_tuning(model, recipe.tuning, recipe.model.name, recipe.model.revision)


def _save_weights(job: Job, trainer: Any, folder: Path) -> None:
    # Gathering what FSDP has spread takes every process; writing it takes one.
    weights = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
    if is_leader():
        save = adapters.save_full if job.recipe.tuning.method == "full" else adapters.save_adapter
        save(trainer.model, folder, weights)
