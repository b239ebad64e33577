"""The story of a training: a recipe, a model and data become a run."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import GenerationConfig, set_seed

from pi_lora.data.batches import TrainingData, training_data
from pi_lora.data.tokens import tokenizer_identity
from pi_lora.distributed import (
    all_gather_objects,
    any_process,
    is_main_process,
    join_processes,
    wait_for_all_processes,
    world_size,
)
from pi_lora.errors import Interrupted, ModelError
from pi_lora.model_ref import ModelRef
from pi_lora.models import adapter as adapters
from pi_lora.models import device as devices
from pi_lora.models.loaded import LoadedModel, Placement, load_base, load_model
from pi_lora.models.resolve import resolve_model
from pi_lora.models.saving import save_other_weights, save_without_weights
from pi_lora.models.source import ModelSource
from pi_lora.planning.gpus import device_here
from pi_lora.planning.training_plan import TrainingPlan, plan_training
from pi_lora.recipe.files import RECIPE_FILE, dump_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.run import CHECKPOINTS, COMPLETE, Run
from pi_lora.staging import resume_command, staged, staging_path
from pi_lora.storage import write_whole
from pi_lora.training.callbacks import (
    CheckpointMarker,
    ScheduledMeasurements,
    StopOnDivergence,
    StopOnSignal,
    TrainingLog,
    redirect_library_logs,
    stop_after_step,
)
from pi_lora.training.trainer import Trainer
from pi_lora.types import Json, Progress, silent


@dataclass(frozen=True)
class TrainingJob:
    """A training of `recipe` on this machine, resolved: nothing is resolved a second time.

    Attributes:
        recipe: The resolved recipe.
        source: The model to tune, extended as the recipe says.
        output: The folder of the run.
        resume: Continue the interrupted run of `output`.
    """

    recipe: Recipe
    source: ModelSource
    output: Path
    resume: bool = False

    @cached_property
    def plan(self) -> TrainingPlan | None:
        """The plan on this machine, whichever GPU the recipe names; None for a model whose shape is not known."""
        try:
            return plan_training(self.recipe, self.source, device_here())
        except ModelError:
            return None

    def run(self, data: TrainingData, *, progress: Progress = silent, write_card: Callable[[Path], object]) -> Run:
        """Tune the model, and save the run whole or not at all.

        Args:
            data: What `pack_data` returns.
            progress: Called with the step, the number of steps, and a line about loss and speed.
            write_card: Called with the folder of the finished run, and again after the last measurement.

        Raises:
            Diverged: The loss or a weight became infinite or NaN.
            Interrupted: A signal came, after a checkpoint was written.
        """
        join_processes(cpu=devices.device().type == "cpu")
        # A notebook may have turned gradients off.
        with stop_after_step() as signals, adapters.without_known_warnings(), torch.enable_grad():
            stop = StopOnSignal(signals)
            tuned = None
            with self.create_run(data) as run, redirect_library_logs(run.path):
                if not any_process(run.is_trained):
                    tuned = self._train(data, run, stop, progress)
                if is_main_process():
                    finish_run(self.recipe, self.source, run)
            finished = Run(self.output)
            if is_main_process():
                write_card(self.output)
            if self.recipe.evaluation.every:
                # The run is whole by now: a signal loses no more than these scores.
                if tuned is None:
                    source = resolve_model(ModelRef(self.output, **vars(self.source.permissions)))
                    tuned = load_model(source)
                measurements = ScheduledMeasurements(self.recipe.evaluation, tuned, finished, stop)
                measurements.measure_at(self.recipe.training.steps)
                if is_main_process():
                    write_card(self.output)
        return finished

    def _train(self, data: TrainingData, run: Run, stop: StopOnSignal, progress: Progress) -> LoadedModel:
        """Train to the last step, and save the weights as the last checkpoint."""
        recipe = run.with_dtypes(self.recipe)
        set_seed(recipe.training.seed)
        tuned = LoadedModel(
            source=self.source,
            module=load_for_tuning(recipe, self.source),
            autocast=devices.measured_under_autocast(recipe),
            run_name=str(self.output),
        )

        def save(log: list[Json]) -> None:
            save_weights(recipe, trainer, log, run)

        divergence = StopOnDivergence(run)
        # Checkpoints are marked before a measurement; the log follows all that ask for a checkpoint.
        callbacks = [
            stop,
            CheckpointMarker(run, recipe.tuning.method != "full" and self.source.needs_own_config),
            ScheduledMeasurements(recipe.evaluation, tuned, run, stop),
            divergence,
            TrainingLog(run, progress, save),
        ]
        trainer = Trainer(
            recipe=recipe,
            model=tuned,
            data=data,
            run=run,
            callbacks=callbacks,
            record_loss=divergence.record_loss,
        )
        base = self.source.base.rope
        if is_main_process():
            run.record(
                {
                    "original": self.source.original,
                    "base_window": base.window if base.is_scaled else None,
                    "trainable_parameters": tuned.module.num_parameters(only_trainable=True),
                    "attention": tuned.kernel,
                    "versions": devices.versions(),
                    "hardware": devices.hardware(),
                }
            )
        checkpoint = None
        if self.resume and is_main_process():
            checkpoint = run.checkpoint_to_resume()
        # All processes take the choice of the main process.
        trainer.train(all_gather_objects([checkpoint])[0])
        if stop.stopped:
            raise Interrupted(
                f"{self.output}: interrupted after step {trainer.state.global_step}, a checkpoint is kept; "
                f"resume it with {resume_command(self.output)}"
            )
        return tuned

    @contextmanager
    def create_run(self, data: TrainingData) -> Iterator[Run]:
        """Let the main process create the folder of the run, which all processes fill; several machines need a folder
        that they share.
        """
        waiting = nullcontext(staging_path(self.output))
        with staged(self.output, resume=self.resume) if is_main_process() else waiting as staging:
            run = Run(staging)
            if is_main_process():
                tokenizer = tokenizer_identity(self.source.tokenizer)
                fingerprint = self.source.base.fingerprint(tokenizer, data.digest)
                # Downloaded now: after hours the hub may not be reached.
                _ = self.source.tokenizer_files
                _ = self.source.processor_files
                run.check_same_fingerprint(self.output, fingerprint, self.source.permissions)
                write_whole(staging / RECIPE_FILE, dump_recipe(self.recipe))
                # Decided once: other processes, or a resumption on another machine, could decide otherwise.
                dtype = str(devices.dtype_of_base(self.recipe)).removeprefix("torch.")
                run.record(
                    {
                        "origin": fingerprint.model_dump(),
                        "precision": run.metadata.precision or devices.computes_in(self.recipe),
                        "base_dtype": run.metadata.base_dtype or dtype,
                        "directory": os.getcwd(),
                        "texts_before": [text.model_dump(mode="json") for text in self.source.texts],
                    }
                )
            wait_for_all_processes()
            yield run
        if is_main_process():
            # Until the run stands under its name, checkpoints are all that is left of it if the process is killed.
            shutil.rmtree(self.output / CHECKPOINTS, ignore_errors=True)


def pack_data(recipe: Recipe, source: ModelSource, progress: Progress = silent) -> TrainingData:
    """Return the packed sequences or the examples of `recipe` for a model; made once, then read from the cache. Texts
    are wrapped if the model does not isolate sequences.
    """
    data = recipe.data
    is_changed = data.has_isolated and not source.base.isolates_sequences
    if is_changed:
        data = data.changed(packing="wrapped")
    packed = training_data(
        data=data,
        training=recipe.training,
        tokenizer=source.tokenizer,
        original=source.original,
        target=recipe.context.target,
        progress=progress,
    )
    if is_changed:
        packed.messages.append("data.packing: wrapped, since a model of this type cannot isolate chats in a sequence")
    return packed


def load_for_tuning(recipe: Recipe, source: ModelSource) -> Any:
    """Load the model and make trainable what trains. A quantized one goes to every device; others are spread by FSDP
    from the host memory of the main process, which alone reads them, or copied by data parallelism.
    """
    attention: str = recipe.model.attention
    if recipe.hardware.context_parallel > 1:
        attention = devices.SDPA  # the only kernel that accelerate divides
    elif attention == devices.SDPA and recipe.data.has_isolated:
        attention = "auto"  # the same kernel for one sequence at a time
    base = load_base(source, devices.dtype_of_base(recipe), attention=attention, placement=_placement(recipe))
    if recipe.sharded and world_size() > 1:
        # transformers reads the weights of some modules in float32 even if asked for bfloat16.
        own_dtypes = {name: weight.dtype for name, weight in base.named_parameters()}
        dtypes = all_gather_objects([own_dtypes])[0]
        for name, weight in base.named_parameters():
            weight.data = weight.data.to(dtypes[name])
    if base.can_generate():
        # transformers 5 refuses to save sampling values without do_sample, which published models have. The file of the
        # base is copied; all that is read here are the EOS tokens.
        base.generation_config = GenerationConfig(eos_token_id=base.generation_config.eos_token_id)
    if source.adapter is not None:
        if is_main_process():
            source.check_base_fingerprint()
        # One adapter of that base: a second one would need both, and merging the first would round a quantized base.
        tuned = adapters.load_adapter(base, source.adapter, dropout=recipe.tuning.dropout, trainable=True)
        adapters.train_in_float32(tuned)
    else:
        tuned = adapters.prepare_for_tuning(base, recipe.tuning, recipe.model.name, recipe.model.revision)
    if recipe.sharded and recipe.tuning.method == "lora":
        adapters.keep_ties(tuned)
    return tuned


def _placement(recipe: Recipe) -> Placement:
    if recipe.tuning.method == "qlora":
        return "quantized"
    if world_size() == 1:
        return "device"
    if recipe.sharded and not is_main_process():
        return "empty"
    return "host"


def save_weights(recipe: Recipe, trainer: Trainer, log: list[Json], run: Run) -> None:
    """Save the tuned weights and the log as the last checkpoint of a run."""
    full = recipe.tuning.method == "full"
    weights: Mapping[str, Any] | None = None
    if trainer.is_fsdp_enabled:
        # Gathering what FSDP has spread takes every process; writing it takes one. A frozen base stays where it is.
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=not full)
        weights = get_model_state_dict(trainer.model, options=options)
    if not is_main_process():
        return
    save: Any = adapters.save_full if full else adapters.save_adapter
    run.save_last(log, lambda folder: save(trainer.model, folder, weights))


def finish_run(recipe: Recipe, source: ModelSource, run: Run) -> None:
    """Make a run of its last checkpoint: with the extended config, the tokenizer, and how the training ended. If the
    disk is full, it is done again when the run is resumed.
    """
    for file in run.final_checkpoint.iterdir():
        if file.name != COMPLETE:
            file.replace(run.path / file.name)
    config = source.config
    if recipe.tuning.method == "full":
        # An adapter's base is stored in a dtype of its own.
        config = {**config, "dtype": "float32"}
        save_other_weights(source.base, run.path)
    elif source.needs_own_config:
        adapters.mark_adapter_extended(run.path)
    save_without_weights(source, config, run.path)
    # The processes before a resume had another peak.
    log = run.log
    run.record({**log[-1], "peak_memory": max(line["peak_memory"] for line in log)})
    # Optimizer states take time to remove: a process that is killed now does not leave them in the finished run.
    for checkpoint in run.checkpoints[1:]:
        shutil.rmtree(checkpoint, ignore_errors=True)
