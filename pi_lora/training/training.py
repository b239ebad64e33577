"""The story of a training: a recipe, a model and data become a run."""

import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import set_seed

from pi_lora.data.batches import TrainingData, training_data
from pi_lora.data.tokens import tokenizer_identity
from pi_lora.distributed import all_gather_objects, is_main_process, join_processes, wait_for_all_processes, world_size
from pi_lora.errors import Interrupted
from pi_lora.evaluation.suite import requested_measurements
from pi_lora.models import adapter as adapters
from pi_lora.models import machine
from pi_lora.models.files import save_config
from pi_lora.models.machine import device
from pi_lora.models.model import Model
from pi_lora.models.tokenizer import save_tokenizer
from pi_lora.models.weights import Placement
from pi_lora.planning.plan import hours_in_words
from pi_lora.recipe.files import RECIPE_FILE, dump_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.report.card import write_card
from pi_lora.run import CHECKPOINTS, Run, resume_command, staged, staging_path
from pi_lora.storage import write_whole
from pi_lora.training.callbacks import Monitor, redirect_library_logs, stop_after_step
from pi_lora.training.trainer import Trainer
from pi_lora.types import Progress, silent


def train(
    recipe: Recipe,
    model: Model,
    data: TrainingData,
    output: Path,
    resume: bool = False,
    progress: Progress = silent,
) -> Path:
    """Tune `model`, found by `find_to_tune`, and save the run whole or not at all. `progress` is called with the step,
    the number of steps, and a line about the loss and speed.
    """
    join_processes(cpu=device().type == "cpu")
    with stop_after_step() as signals, adapters.without_known_warnings():
        with create_run(recipe, model, data, output, resume) as run, redirect_library_logs(run.path):
            # The precision that the run has from its start, instead of `auto`.
            training = recipe.training.changed(precision=run.metadata.precision)
            recipe = recipe.model_copy(update={"training": training})
            set_seed(training.seed)
            tuned = model.changed(
                name=str(output),
                model=load_for_tuning(recipe, model),
                autocast=machine.measured_under_autocast(recipe),
                in_training=True,
            )
            monitor = Monitor(recipe, tuned, run, signals, progress)
            trainer = Trainer(recipe, tuned, data, run, monitor)
            # The first process finds the checkpoint that all of them resume.
            trainer.train(all_gather_objects([run.checkpoint_to_resume() if resume and is_main_process() else None])[0])
            if monitor.stopped:
                step, how = trainer.state.global_step, resume_command(output)
                raise Interrupted(
                    f"{output}: interrupted after step {step}, a checkpoint is kept; resume it with {how}"
                )
            save(recipe, tuned, trainer, run)
        if is_main_process():
            write_card(output)
        if recipe.evaluation.every:
            # The run is whole by now: a signal loses no more than these scores.
            monitor.measure(Run(output), training.steps)
            if is_main_process():
                write_card(output)
    return output


def prepare_data(recipe: Recipe, model: Model, progress: Progress = silent) -> TrainingData:
    """Return the packed sequences or the examples of `recipe` for `model`; made once, then read from the cache."""
    lengths = model.original, recipe.context.target
    return training_data(recipe.data, recipe.training, model.tokenizer, *lengths, progress)


@contextmanager
def create_run(recipe: Recipe, model: Model, data: TrainingData, output: Path, resume: bool) -> Iterator[Run]:
    """Let the first process make the run `output`, and all others fill it with it; several machines need a folder that
    they share.
    """
    waiting = nullcontext(staging_path(output))
    with staged(output, resume) if is_main_process() else waiting as staging:
        run = Run(staging)
        if is_main_process():
            origin = model.origin(tokenizer_identity(model.tokenizer), data.digest)
            run.check_same_fingerprint(output, origin, model.permissions)
            write_whole(staging / RECIPE_FILE, dump_recipe(recipe))
            # Decided once: other processes, or a resumption on another machine, could decide otherwise.
            precision = run.metadata.precision or machine.computes_in(recipe)
            run.record({"origin": origin.model_dump(), "precision": precision})
        wait_for_all_processes()
        yield run
    if is_main_process():
        # Only now: until the run stands under its name, they are all that is left of it if the process is killed.
        shutil.rmtree(output / CHECKPOINTS, ignore_errors=True)


def load_for_tuning(recipe: Recipe, model: Model) -> Any:
    """Load the model and make trainable what trains. A quantized one goes to every device; others are spread by FSDP
    from the host memory of the first process, which alone reads them, or copied by data parallelism.
    """
    several = world_size() > 1
    place: Placement = "quantized" if recipe.tuning.method == "qlora" else "host" if several else "device"
    if place == "host" and recipe.sharded and not is_main_process():
        place = "empty"
    attention = machine.SDPA if recipe.model.attention == "auto" else recipe.model.attention
    base = model.load_weights(machine.dtype_of_base(recipe), attention, place)
    if recipe.sharded and several:
        # transformers reads the weights of some modules in float32 even if asked for bfloat16.
        dtypes = all_gather_objects([{name: weight.dtype for name, weight in base.named_parameters()}])[0]
        for name, weight in base.named_parameters():
            weight.data = weight.data.to(dtypes[name])
    if model.adapter is not None:
        if is_main_process():
            model.check_base_fingerprint()
        # One adapter of that base: a second one would need both, and merging the first would round a quantized base.
        tuned = adapters.load_adapter(base, model.adapter, recipe.tuning.dropout, trainable=True)
        adapters.train_in_float32(tuned)
    else:
        tuned = adapters.prepare_for_tuning(base, recipe.tuning, recipe.model.name, recipe.model.revision)
    if recipe.sharded and recipe.tuning.method == "lora":
        adapters.keep_ties(tuned)
    return tuned


def save(recipe: Recipe, model: Model, trainer: Trainer, run: Run) -> None:
    """Save what was tuned, with the extended config, the tokenizer, and what it took."""
    full = recipe.tuning.method == "full"
    weights: Mapping[str, Any] | None = None
    if trainer.is_fsdp_enabled:
        # Gathering what FSDP has spread takes every process; writing it takes one. A frozen base stays where it is.
        how = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=not full)
        weights = get_model_state_dict(trainer.model, options=how)
    if not is_main_process():
        return
    (adapters.save_full if full else adapters.save_adapter)(trainer.model, run.path, weights)
    if not full and model.needs_its_config:
        adapters.mark_adapter_extended(run.path)
    # An adapter's base is stored in a dtype of its own.
    save_config({**model.config, "dtype": model.dtype} if full else model.config, run.path)
    save_tokenizer(model.tokenizer, run.path)
    facts = {
        "original": model.original,
        "trainable_parameters": model.model.num_parameters(only_trainable=True),
        "attention": model.kernel,
        "versions": machine.versions(),
        "hardware": machine.hardware(),
    }
    # The processes before a resume had another peak.
    run.record({**facts, **run.log[-1], "peak_memory": max(line["peak_memory"] for line in run.log)})


def closing_lines(recipe: Recipe, folder: Path) -> list[str]:
    """Return how a training ended, and the command that measures it on the text that its recipe names; a source was
    trained on whole, so another text is asked for.
    """
    last = Run(folder).log[-1]
    speed, hours = last["tokens"] / last["seconds"], hours_in_words(last["seconds"] / 3600)
    how = ["all", str(folder)]
    if recipe.data.has_examples:
        how = ["summarization", str(folder)]
    elif not requested_measurements(recipe.evaluation):
        how = ["perplexity", str(folder), "--data", "HELD_OUT_TEXT"]
    return [
        f"{folder}: step {last['step']}, loss {last['loss']:.3f}, {hours}, {speed:,.0f} tokens/s",
        f"measure it with {shlex.join(['pi-lora', 'eval', *how])}",
    ]
