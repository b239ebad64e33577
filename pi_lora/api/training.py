"""Trainings: planned, resolved, packed and run; and new recipes."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pi_lora.api.inputs import (
    AnyModel,
    AnyRecipe,
    FilePath,
    Override,
    as_words,
    command,
    given_recipe,
    name_of,
    optional_path,
    path_of,
    recipe_name,
    ref_of,
    tokens_of,
)
from pi_lora.errors import ModelError, RecipeError
from pi_lora.types import LIBRARIES, Permissions, ui

if TYPE_CHECKING:
    from pi_lora.planning.training_plan import TrainingPlan
    from pi_lora.run import Run
    from pi_lora.training.job import TrainingJob

# Each function imports what it needs: a plan does without torch.


@command
def train(
    recipe: AnyRecipe,
    *overrides: Override,
    output: FilePath | None = None,
    resume: bool = False,
    force: bool = False,
    trust_remote_code: bool = False,
    allow_mismatch: bool = False,
    progress: bool = True,
) -> "Run":
    """Tune a model to its target window as `pi-lora train` does, and return the run.

    Args:
        recipe: A recipe file, the name of one that comes with pi-lora, such as `demo`, a mapping of sections, such as
            `{"model": {"name": "builtin:tiny"}, ...}`, or a `Recipe`.
        overrides: Keys to change, as on the command line, `"training.steps=100"`, or as `{"training.steps": 100}`.
        output: The folder of the run; by default `adapters/<recipe>`, of full tuning `models/<recipe>`. A recipe that
            is no file needs it.
        resume: Continue an interrupted run of the same recipe, or `recipe`, the folder of an interrupted run.
        force: Train even if the plan says that it does not fit.
        trust_remote_code: Run Python code that the model brings.
        allow_mismatch: Use a run although its base or data changed.
        progress: Whether to show a progress bar.

    Raises:
        PiLoraError: All mistakes in recipe, model, data or output that show before weights are read, at once.
        RecipeError: The recipe asks for several processes and a launcher did not start them; `pi-lora train` does.
        Diverged: The loss or a weight became infinite or NaN.
        Interrupted: SIGINT, SIGTERM or SIGHUP, after a checkpoint was written.
    """
    job = resolve_training(
        recipe,
        *overrides,
        output=output,
        resume=resume,
        force=force,
        trust_remote_code=trust_remote_code,
        allow_mismatch=allow_mismatch,
        launches=False,
    )
    return run_training(job, progress=progress)


@command
def resolve_training(
    recipe: AnyRecipe,
    *overrides: Override,
    output: FilePath | None = None,
    resume: bool = False,
    force: bool = False,
    trust_remote_code: bool = False,
    allow_mismatch: bool = False,
    ask_hub: bool = False,
    launches: bool = True,
) -> "TrainingJob":
    """Resolve and check a training: recipe, model, data, output, and a plan that fits. Of launched processes only the
    one that launched them checks.

    Args:
        recipe: As for `train`.
        overrides: As for `train`.
        output: As for `train`.
        resume: As for `train`.
        force: As for `train`.
        trust_remote_code: As for `train`.
        allow_mismatch: As for `train`.
        ask_hub: Also ask the hub for weights and texts.
        launches: Whether the caller launches the processes of a recipe that asks for several.

    Raises:
        PiLoraError: All mistakes that show before weights are read, at once.
    """
    from pi_lora.distributed import check_launched, enable_expandable_segments, is_launched
    from pi_lora.staging import resolve_run

    permissions = Permissions(trust_remote_code, allow_mismatch)
    given = given_recipe(recipe)
    resolved, output = resolve_run(given, as_words(overrides), optional_path(output), resume)
    processes = resolved.hardware.processes
    if processes > 1 and not launches and not is_launched():
        raise RecipeError(
            [f"hardware: asks for {processes} processes; start them with pi-lora train {recipe_name(recipe)}"]
        )
    enable_expandable_segments()
    # Ctrl-C ends at once until all libraries are imported: some turn it into an error of their own.
    with ui.working(LIBRARIES):
        from pi_lora.data.checks import source_notes
        from pi_lora.evaluation.suite import requested_measurements
        from pi_lora.evaluation.texts import training_notes
        from pi_lora.models.resolve import resolve_for_training
        from pi_lora.preflight import check, plan_or_refuse
        from pi_lora.training.job import TrainingJob

        if is_launched():
            check_launched(resolved)
            resumed = output if resume else None
            source = resolve_for_training(resolved, permissions=permissions, resumed=resumed)
            return TrainingJob(resolved, source, output, resume)
        source = check(resolved, output, resume=resume, permissions=permissions, ask_hub=ask_hub)
        job = TrainingJob(resolved, source, output, resume)
        lines = plan_or_refuse(job.source.base.name, job.plan, force=force or resume)
        if ask_hub:
            window = resolved.data.tokens_per_sequence(source.original, resolved.context.target)
            lines += source_notes(resolved.data, source.tokenizer, window)
        for options in requested_measurements(resolved.evaluation).values():
            lines += training_notes(options, "the run", [*source.texts, *resolved.data.source])
    for line in dict.fromkeys(lines):
        ui.show(line)
    return job


@command
def run_training(job: "TrainingJob", *, launch: Sequence[str] | None = None, progress: bool = True) -> "Run":
    """Pack the data of a resolved training and run it.

    Args:
        job: What `resolve_training` returns.
        launch: The arguments of `accelerate launch` that start the processes, if several are to be started.
        progress: As for `train`.

    Raises:
        Diverged: The loss or a weight became infinite or NaN.
        Interrupted: SIGINT, SIGTERM or SIGHUP, after a checkpoint was written.
    """
    from pi_lora.distributed import is_launched, is_main_process
    from pi_lora.distributed import launch as launch_processes
    from pi_lora.evaluation.suite import measuring_command
    from pi_lora.planning.training_plan import hours_in_words
    from pi_lora.report.card import write_card
    from pi_lora.training.job import pack_data

    title = "preparing examples" if job.recipe.data.has_examples else "packing sequences"
    with ui.progress(title) as packed:
        data = pack_data(job.recipe, job.source, packed)
    if not is_launched():
        for message in data.messages:
            ui.show(f"data: {message}")
        if launch:
            sys.exit(launch_processes(launch))
    with ui.progress("training steps") as steps:
        run = job.run(data, progress=steps, write_card=write_card)
    if is_main_process():
        last = run.log[-1]
        speed = last["tokens"] / last["seconds"]
        hours = hours_in_words(last["seconds"] / 3600)
        ui.show(f"{run}: step {last['step']}, loss {last['loss']:.3f}, {hours}, {speed:,.0f} tokens/s")
        ui.show(f"measure it with {measuring_command(str(run), job.recipe)}")
    return run


def launch_arguments(
    job: "TrainingJob", command: Sequence[str], *, rank: int = 0, address: str | None = None, port: int | None = None
) -> list[str] | None:
    """Return the arguments of `accelerate launch` that run `pi-lora COMMAND` in several processes; None for a training
    of one process, and in a process that was launched.

    Args:
        job: What `resolve_training` returns.
        command: The arguments of `pi-lora`.
        rank: The number of this machine, from 0.
        address: The address of machine 0.
        port: The port on machine 0.

    Raises:
        RecipeError: Several machines need an `address`, or there is no machine of this rank.
    """
    from pi_lora.distributed import is_launched, launch_arguments

    machines = job.recipe.hardware.machines
    if rank >= machines:
        raise RecipeError([f"--machine-rank: {rank}: hardware.machines is {machines}, and ranks begin at 0; lower it"])
    if is_launched() or job.recipe.hardware.processes == 1:
        return None
    return launch_arguments(job.recipe, command, rank, address, port)


@command
def prepare(
    recipe: AnyRecipe,
    *overrides: Override,
    trust_remote_code: bool = False,
    allow_mismatch: bool = False,
    progress: bool = True,
) -> list[str]:
    """Tokenize and pack the training data of a recipe into the cache, and return what was made and left out.

    Args:
        recipe: A recipe file, or the name of one that comes with pi-lora.
        overrides: Keys to change, as for `train`.
        trust_remote_code: As for `train`.
        allow_mismatch: As for `train`.
        progress: Whether to show a progress bar.

    Raises:
        PiLoraError: The recipe, the model or the data is wrong.
    """
    with ui.working(LIBRARIES):
        from pi_lora.preflight import check_data
        from pi_lora.recipe.files import load_recipe
        from pi_lora.storage import cache_folder
        from pi_lora.training.job import pack_data

        resolved = load_recipe(given_recipe(recipe), as_words(overrides)).recipe
        source = check_data(resolved, Permissions(trust_remote_code, allow_mismatch))
    with ui.progress("preparing data") as rows:
        data = pack_data(resolved, source, rows)
    for message in data.messages:
        ui.show(f"data: {message}")
    ui.show(f"{cache_folder()}: has the data of {recipe_name(recipe)}; pi-lora train reads it from there")
    return data.messages


@command
def plan(
    recipe: AnyRecipe,
    *overrides: Override,
    gpu: str | None = None,
    trust_remote_code: bool = False,
    allow_mismatch: bool = False,
    json: FilePath | None = None,
) -> "TrainingPlan":
    """Plan the memory, tokens and hours of a recipe as `pi-lora plan` does, before anything is downloaded or loaded.

    Args:
        recipe: A recipe file, or the name of one that comes with pi-lora, such as `7b_16k`.
        overrides: Keys to change, as for `train`.
        gpu: A device such as `4090`, `A100-80` or `H100`, any by its memory, as `48GB`, or `cpu`; by default the one
            that the recipe names as `hardware.gpu`, else this machine's.
        trust_remote_code: As for `train`.
        allow_mismatch: As for `train`.
        json: A file to write the plan to.

    Returns:
        The plan: `fits`, `memory.peak` in bytes on each device, `tokens`, and `hours`, which is None where the peak of
        the device is not known.

    Raises:
        RecipeError: The recipe is wrong.
        PiLoraError: The device is not known, or the model cannot be found or extended.
    """
    with ui.working(LIBRARIES):
        from pi_lora.models.resolve import resolve_for_training
        from pi_lora.planning.advice import plan_lines
        from pi_lora.planning.gpus import device_for
        from pi_lora.planning.training_plan import plan_training
        from pi_lora.recipe.files import load_recipe
        from pi_lora.storage import write_json

        resolved = load_recipe(given_recipe(recipe), as_words(overrides)).recipe
        device = device_for(resolved, gpu)
        permissions = Permissions(trust_remote_code, allow_mismatch)
        source = resolve_for_training(resolved, permissions=permissions, shipped=True)
        planned = plan_training(resolved, source, device)
    if json:
        write_json(path_of(json), planned.as_json())
    for line in plan_lines(planned):
        ui.show(line)
    return planned


@command
def new(
    model: AnyModel,
    target: int,
    *,
    gpu: str | None = None,
    data: FilePath | Sequence[FilePath] = (),
    column: str = "text",
    probe: FilePath | None = None,
    output: FilePath | None = None,
) -> Path:
    """Write a commented recipe that extends a model to a target window and fits a device, and return the file.

    Args:
        model: The model to extend.
        target: L', the window to extend to, in tokens.
        gpu: A device as for `plan`; by default this machine's.
        data: Texts to tune on: a file, folder, glob or hub id, or several.
        column: Of rows, the column that holds the text or the chats.
        probe: A file that `probe` wrote, which names the scaling.
        output: The recipe file; by default `MODEL_TARGET.yaml`.

    Raises:
        RunExistsError: The file exists.
        ModelError: The model is an adapter, has weights that cannot be tuned, or is not that of the probe.
        PiLoraError: No tuning of the model fits the device, or a text cannot be read.
    """
    given = [data] if isinstance(data, str | Path) else data
    texts = [name_of(text) for text in given]
    target = tokens_of(target)
    with ui.working("reading model and text"):
        from pi_lora.evaluation.probe import read_probe
        from pi_lora.models.quantized import check_quantization
        from pi_lora.models.resolve import resolve_model
        from pi_lora.planning.advice import plan_lines
        from pi_lora.planning.new_recipe import new_recipe

        source = resolve_model(ref_of(model), shipped=True)
        if source.adapter:
            raise ModelError(f"{source.name}: is an adapter; merge it first: pi-lora merge {shlex.quote(source.name)}")
        check_quantization(source.base)
        probed = None
        if probe:
            whole_probe = read_probe(path_of(probe))
            whole_probe.check_is_of(source.base)
            result = whole_probe.at(target)
            probed = result.to_tune()
        file, planned, notes = new_recipe(
            source,
            target,
            gpu=gpu,
            texts=texts,
            column=column,
            probed=probed,
            output=optional_path(output),
        )
    for line in plan_lines(planned):
        ui.show(line)
    if probe and not probed:
        ui.say(f"--probe: {result.best} is best there, for comparison alone; the recipe has {planned.recipe.scaling}")
    for note in notes:
        ui.say(note)
    ui.show(f"{file}: written; read it, then: pi-lora train {shlex.quote(str(file))}")
    return file
