"""The commands as functions, for the command line and for Python alike: names and plain values in, typed results out.

Models are named as on the command line, or given as a loaded model, or as the run that `train` returns. Paths are
strings or `Path`, and `~` is the home folder. Every mistake that a user can correct is a `PiLoraError`.
"""

import json as json_format
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, Union

from pi_lora.errors import ModelError, PiLoraError, RecipeError
from pi_lora.types import LIBRARIES, NO_PERMISSIONS, SILENT, UI, MeasureOptions, Permissions, Progress

if TYPE_CHECKING:
    from pi_lora.evaluation.measurement import Scores
    from pi_lora.evaluation.passkey import PasskeyScores
    from pi_lora.evaluation.perplexity import PerplexityScores
    from pi_lora.evaluation.probe import Probe
    from pi_lora.merging.merging import Merged
    from pi_lora.models.loaded import LoadedModel
    from pi_lora.models.source import ModelSource
    from pi_lora.planning.training_plan import TrainingPlan
    from pi_lora.recipe.files import ResolvedRecipe
    from pi_lora.recipe.section import Section
    from pi_lora.report.comparison import Comparison
    from pi_lora.run import Run
    from pi_lora.scaling.config import Extension, Method
    from pi_lora.serving.check import Verdict
    from pi_lora.training.job import TrainingJob

# Each function imports what it needs: a plan does without torch.

FilePath: TypeAlias = str | Path
AnyModel: TypeAlias = Union[str, Path, "Run", "ModelSource", "LoadedModel", "Merged"]
Override: TypeAlias = str | Mapping[str, Any]
SectionT = TypeVar("SectionT", bound="Section")
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def resolve(
    model: AnyModel,
    *,
    extension: "Extension | None" = None,
    base: str | None = None,
    revision: str = "main",
    permissions: Permissions = NO_PERMISSIONS,
) -> "ModelSource":
    """Resolve a model without reading weights: window, scale, configs and tokenizer are known.

    Args:
        model: A hub id, a folder of full weights, `builtin:tiny`, or a run or adapter, which brings its own scaling.
        extension: How to extend a plain base, such as `Extension(target=16384)`.
        base: Where the base of a run or adapter is now, if it moved.
        revision: The branch, tag or commit of a hub id.
        permissions: Whether code of the model may run, and a run be used whose base changed.

    Raises:
        ModelError: The model is missing, incomplete or not the one that a run was tuned from.
        ScalingError: The model cannot be extended.
    """
    from pi_lora.models.loaded import LoadedModel
    from pi_lora.models.source import ModelSource, resolve_model

    if isinstance(model, LoadedModel):
        return model.source
    if isinstance(model, ModelSource):
        return model
    return resolve_model(_name(model), extension, permissions=permissions, revision=revision, base=base)


def load(
    model: AnyModel,
    extension: "Extension | None" = None,
    dtype: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    base: str | None = None,
) -> "LoadedModel":
    """Load a model with its scaling, ready to be measured.

    Args:
        model: A hub id, a folder of full weights, `builtin:tiny`, or a run or adapter, which brings its own scaling.
        extension: How to extend a plain base that was not tuned, such as `Extension(target=16384)`.
        dtype: `float32`, `bfloat16` or `float16`; by default as stored on a GPU, float32 on a CPU, and bfloat16 after
            QLoRA.
        permissions: Whether code of the model may run, and a run be used whose base or data changed.
        base: Where the base of a run or adapter is now, if it moved.

    Returns:
        The model: `module` is that of transformers or PEFT; `tokenizer`, the `window` in tokens, the `scale` L'/L.

    Raises:
        ModelError: The model is missing, incomplete or not the one that a run was tuned from.
        ScalingError: The model cannot be extended.
    """
    from pi_lora.models.loaded import LoadedModel, load_model

    if isinstance(model, LoadedModel):
        return model
    return load_model(resolve(model, extension=extension, base=base, permissions=permissions), _dtype(dtype))


def train(
    recipe: FilePath,
    *overrides: Override,
    output: FilePath | None = None,
    resume: bool = False,
    force: bool = False,
    permissions: Permissions = NO_PERMISSIONS,
    progress: Progress | bool | UI = True,
) -> "Run":
    """Tune a model to its target window as `pi-lora train` does, and return the run.

    Args:
        recipe: A recipe file, or the name of one that comes with pi-lora, such as `demo`.
        overrides: Keys to change, as on the command line, `"training.steps=100"`, or as `{"training.steps": 100}`.
        output: The folder of the run; by default `adapters/<recipe>`, of full tuning `models/<recipe>`.
        resume: Continue an interrupted run of the same recipe, or `recipe`, the folder of an interrupted run.
        force: Train even if the plan says that it does not fit.
        permissions: Whether code of the model may run, and a run be used whose base changed.
        progress: Whether to show a progress bar, or a function: it is called with the step, the number of steps, and a
            line with loss, tokens a second and memory.

    Raises:
        PiLoraError: All mistakes in recipe, model, data or output that show before weights are read, at once.
        RecipeError: The recipe asks for several processes and a launcher did not start them; `pi-lora train` does.
        Diverged: The loss or a weight became infinite or NaN.
        Interrupted: SIGINT, SIGTERM or SIGHUP, after a checkpoint was written.
    """
    ui = _ui(progress)
    job = resolve_training(
        recipe,
        *overrides,
        output=output,
        resume=resume,
        force=force,
        permissions=permissions,
        launches=False,
        progress=ui,
    )
    return run_training(job, progress=ui)


def resolve_training(
    recipe: FilePath,
    *overrides: Override,
    output: FilePath | None = None,
    resume: bool = False,
    force: bool = False,
    permissions: Permissions = NO_PERMISSIONS,
    ask_hub: bool = False,
    launches: bool = True,
    progress: Progress | bool | UI = False,
) -> "TrainingJob":
    """Resolve and check a training: recipe, model, data, output, and a plan that fits. Of launched processes only the
    one that launched them checks.

    Args:
        recipe: As for `train`.
        overrides: As for `train`.
        output: As for `train`.
        resume: As for `train`.
        force: As for `train`.
        permissions: As for `train`.
        ask_hub: Also ask the hub for weights and texts.
        launches: Whether the caller launches the processes of a recipe that asks for several.
        progress: As for `train`; the lines of the plan are shown.

    Raises:
        PiLoraError: All mistakes that show before weights are read, at once.
    """
    from pi_lora.distributed import check_launched, enable_expandable_segments, is_launched
    from pi_lora.run import resolve_run

    ui = _ui(progress)
    resolved, output = resolve_run(_path(recipe), _as_words(overrides), _path(output) if output else None, resume)
    processes = resolved.hardware.processes
    if processes > 1 and not launches and not is_launched():
        raise RecipeError([f"hardware: asks for {processes} processes; start them with pi-lora train {recipe}"])
    enable_expandable_segments()
    # Ctrl-C ends at once until all libraries are imported: some turn it into an error of their own.
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.probe import better_scaling
        from pi_lora.models.source import resolve_for_training
        from pi_lora.preflight import check, plan_or_refuse
        from pi_lora.training.job import TrainingJob

        if is_launched():
            check_launched(resolved)
            source = resolve_for_training(resolved, permissions=permissions)
            return TrainingJob(resolved, source, output, resume)
        source = check(resolved, output, resume=resume, permissions=permissions, ask_hub=ask_hub)
        job = TrainingJob(resolved, source, output, resume)
        lines = plan_or_refuse(job.source.base.name, job.plan, force=force or resume)
        lines += better_scaling(resolved.model.name, resolved.context.target, resolved.scaling)
    for line in lines:
        ui.show(line)
    return job


def run_training(
    job: "TrainingJob", *, launch: Sequence[str] | None = None, progress: Progress | bool | UI = True
) -> "Run":
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
    from pi_lora.report.card import write_card
    from pi_lora.training.job import closing_lines

    ui = _ui(progress)
    title = "preparing examples" if job.recipe.data.has_examples else "packing sequences"
    with ui.progress(title) as packed:
        data = job.pack(packed)
    if not is_launched():
        for message in data.messages:
            ui.show(f"data: {message}")
        if launch:
            sys.exit(launch_processes(launch))
    with ui.progress("training steps") as steps:
        run = job.run(data, progress=steps, write_card=write_card)
    if is_main_process():
        for line in closing_lines(job.recipe, run):
            ui.show(line)
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
        RecipeError: Several machines need an `address`.
    """
    from pi_lora.distributed import is_launched, launch_arguments

    if is_launched() or job.recipe.hardware.processes == 1:
        return None
    return launch_arguments(job.recipe, command, rank, address, port)


def prepare(
    recipe: FilePath,
    *overrides: Override,
    permissions: Permissions = NO_PERMISSIONS,
    progress: Progress | bool | UI = True,
) -> list[str]:
    """Tokenize and pack the training data of a recipe into the cache, and return what was made and left out.

    Args:
        recipe: A recipe file, or the name of one that comes with pi-lora.
        overrides: Keys to change, as for `train`.
        permissions: Whether code of the model may run.
        progress: Whether to show a progress bar, or a function that is called with the rows made and all rows.

    Raises:
        PiLoraError: The recipe, the model or the data is wrong.
    """
    ui = _ui(progress)
    with ui.working(LIBRARIES):
        from pi_lora.preflight import check_data
        from pi_lora.recipe.files import load_recipe
        from pi_lora.storage import cache_folder
        from pi_lora.training.job import TrainingJob

        resolved = load_recipe(_path(recipe), _as_words(overrides)).recipe
        job = TrainingJob(resolved, check_data(resolved, permissions), Path(recipe))
    with ui.progress("preparing data") as rows:
        data = job.pack(rows)
    for message in data.messages:
        ui.show(f"data: {message}")
    ui.show(f"{cache_folder()}: has the data of {recipe}; pi-lora train reads it from there")
    return data.messages


def plan(
    recipe: FilePath,
    *overrides: Override,
    gpu: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    json: FilePath | None = None,
    progress: Progress | bool | UI = False,
) -> "TrainingPlan":
    """Plan the memory, tokens and hours of a recipe as `pi-lora plan` does, before anything is downloaded or loaded.

    Args:
        recipe: A recipe file, or the name of one that comes with pi-lora, such as `7b_16k`.
        overrides: Keys to change, as for `train`.
        gpu: A device such as `4090`, `A100-80` or `H100`, any by its memory, as `48GB`, or `cpu`; by default the one
            that the recipe names as `hardware.gpu`, else this machine's.
        permissions: Whether code of the model may run, and a changed run be used.
        json: A file to write the plan to.
        progress: A `UI` is shown the plan.

    Returns:
        The plan: `fits`, `memory.peak` in bytes on each device, `tokens`, and `hours`, which is None where the peak of
        the device is not known.

    Raises:
        RecipeError: The recipe is wrong.
        PiLoraError: The device is not known, or the model cannot be found or extended.
    """
    from pi_lora.models.source import resolve_for_training
    from pi_lora.planning.advice import plan_lines
    from pi_lora.planning.gpus import device_for
    from pi_lora.planning.training_plan import plan_training
    from pi_lora.recipe.files import load_recipe
    from pi_lora.storage import write_json

    resolved = load_recipe(_path(recipe), _as_words(overrides)).recipe
    ui = _ui(progress)
    device = device_for(resolved, gpu)
    planned = plan_training(resolved, resolve_for_training(resolved, permissions=permissions, shipped=True), device)
    if json:
        write_json(_path(json), planned.as_json())
    for line in plan_lines(planned):
        ui.show(line)
    return planned


def new(
    model: AnyModel,
    target: int,
    *,
    gpu: str | None = None,
    data: Sequence[str] = (),
    column: str = "text",
    probe: FilePath | None = None,
    output: FilePath | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    progress: Progress | bool | UI = False,
) -> Path:
    """Write a commented recipe that extends a model to a target window and fits a device, and return the file.

    Args:
        model: The model to extend.
        target: L', the window to extend to, in tokens.
        gpu: A device as for `plan`; by default this machine's.
        data: Texts to tune on: files, folders, globs or hub ids.
        column: Of rows, the column that holds the text or the chats.
        probe: A file that `probe` wrote, which names the scaling.
        output: The recipe file; by default `MODEL_TARGET.yaml`.
        permissions: Whether code of the model may run.
        progress: A `UI` is shown the plan and notes.

    Raises:
        RunExistsError: The file exists.
        PiLoraError: No tuning of the model fits the device, or a text cannot be read.
    """
    ui = _ui(progress)
    with ui.working("reading model and text"):
        from pi_lora.evaluation.probe import read_probe
        from pi_lora.planning.advice import plan_lines
        from pi_lora.planning.new_recipe import new_recipe

        probed = read_probe(_path(probe)).at(target).to_tune() if probe else None
        file, planned, notes = new_recipe(
            _name(model),
            target,
            gpu=gpu,
            texts=data,
            column=column,
            probed=probed,
            output=_path(output) if output else None,
            permissions=permissions,
        )
    for line in plan_lines(planned):
        ui.show(line)
    for note in notes:
        ui.say(note)
    ui.show(f"{file}: written; read it, then: pi-lora train {shlex.quote(str(file))}")
    return file


def evaluate(
    model: AnyModel,
    measurement: str,
    *,
    extension: "Extension | None" = None,
    dtype: str | None = None,
    base: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    json: FilePath | None = None,
    progress: Progress | bool | UI = False,
    **options: Any,
) -> "Scores":
    """Measure a model as `pi-lora eval MEASUREMENT` does. An interrupted measurement continues when it is called again.

    Args:
        model: The model, or what `load` returns.
        measurement: `perplexity`, `passkey`, `benchmarks`, `ruler`, `summarization` or `chat`.
        extension: How to extend a plain base, such as `Extension(target=16384)`.
        dtype: The dtype of the weights, as for `load`.
        base: Where the base of a run is now, if it moved.
        permissions: Whether code of the model may run, and a run be used whose base changed.
        json: A file to write the scores to.
        progress: Whether to show a progress bar, or a function that is called with the work done and all work.
        options: The options of the command, such as `windows=[4096, 8192]`.

    Raises:
        PiLoraError: An option is wrong, or the model or the data cannot be read.
    """
    [scores] = evaluate_models(
        [model],
        measurement,
        options,
        extension=extension,
        dtype=dtype,
        base=base,
        permissions=permissions,
        json=json,
        progress=progress,
    )
    return scores


def evaluate_models(
    models: Sequence[AnyModel],
    measurement: str,
    options: "Section | Mapping[str, Any]",
    *,
    extension: "Extension | None" = None,
    dtype: str | None = None,
    base: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    json: FilePath | None = None,
    progress: Progress | bool | UI = False,
) -> "list[Scores]":
    """Measure several models with the same options, side by side.

    Args:
        models: The models.
        measurement: As for `evaluate`.
        options: The options of the measurement.
        extension: How to extend plain bases.
        dtype: As for `evaluate`.
        base: As for `evaluate`.
        permissions: As for `evaluate`.
        json: As for `evaluate`.
        progress: As for `evaluate`.

    Raises:
        PiLoraError: An option is wrong, or a model or the data cannot be read.
    """
    ui = _ui(progress)
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.suite import MEASUREMENTS, evaluate, scores_table
        from pi_lora.models.loaded import LoadedModel

        if measurement not in MEASUREMENTS:
            raise PiLoraError(f"{measurement}: no such measurement; choose from {', '.join(MEASUREMENTS)}")
        section = _section(MEASUREMENTS[measurement].options, options) if isinstance(options, Mapping) else options
        resolved: list[ModelSource | LoadedModel] = []
        for model in models:
            if isinstance(model, LoadedModel):
                resolved.append(model)
            else:
                resolved.append(resolve(model, extension=extension, base=base, permissions=permissions))
        _join_launched_processes()
    files = {measurement: _path(json)} if json else {}
    scores = evaluate(resolved, {measurement: section}, files, dtype=_dtype(dtype), ui=ui)[measurement]
    ui.show_table(scores_table(scores))
    return scores


def evaluate_perplexity(
    model: AnyModel,
    data: str | None = None,
    windows: Sequence[int] | None = None,
    *,
    stride: int | None = None,
    documents: int | None = None,
    progress: Progress | bool | UI = False,
) -> "PerplexityScores":
    """Measure sliding-window perplexity as `pi-lora eval perplexity` does (paper, section 3.2).

    Args:
        model: A model, or what `load` returns.
        data: A file, folder, glob or hub data set; `builtin:stdlib`, `pg19` or `proof-pile`; by default what the recipe
            of a run names, and of the built-in model `builtin:stdlib`.
        windows: Lengths in tokens; by default the model's window and its halves down to 256.
        stride: Tokens that a window moves; by default 256, or half the shortest window where that is less.
        documents: Only the first so many that are at least as long as the longest window.
        progress: Whether to show a progress bar, or a function that is called with the work done and all work.

    Returns:
        Scores whose `windows` hold the `perplexity` of each length, and the number of `tokens` that it is the mean of.

    Raises:
        DataError: `data` is missing or cannot be read, or no document is as long as the longest window.
        ModelError: The model cannot be found or loaded.
        PiLoraError: An option is wrong.
    """
    from pi_lora.evaluation.measurement import Session
    from pi_lora.evaluation.perplexity import Perplexity
    from pi_lora.recipe.evaluation import PerplexityOptions

    values = {"data": data, "windows": windows, "stride": stride, "documents": documents}
    options = _section(PerplexityOptions, values)
    with _ui(progress).progress("perplexity") as passes:
        return Perplexity().run(load(model), options, Session(passes))


def evaluate_passkey(
    model: AnyModel,
    target: int | None = None,
    *,
    depths: int = 32,
    trials: int = 10,
    seed: int = 0,
    progress: Progress | bool | UI = False,
) -> "PasskeyScores":
    """Measure passkey retrieval as `pi-lora eval passkey` does (paper, section 3.3).

    Args:
        model: A model, or what `load` returns.
        target: Tokens of context, prompt and answer together; by default the model's window.
        depths: Distances between passkey and question, evenly spaced to `target`.
        trials: Random passkeys at each.
        seed: Of the passkeys.
        progress: Whether to show a progress bar, or a function that is called with the work done and all work.

    Returns:
        Scores with the `success_rate` at each of `depths`, and `k_max`, the distance in tokens up to which each is
        retrieved in at least a fifth of the trials.

    Raises:
        ModelError: The model cannot be found or loaded.
        PiLoraError: An option is wrong.
    """
    from pi_lora.evaluation.measurement import Session
    from pi_lora.evaluation.passkey import Passkey
    from pi_lora.recipe.evaluation import PasskeyOptions

    options = _section(PasskeyOptions, {"target": target, "depths": depths, "trials": trials, "seed": seed})
    with _ui(progress).progress("passkey") as prompts:
        return Passkey().run(load(model), options, Session(prompts))


def evaluate_run(
    run: AnyModel,
    *,
    data: str | None = None,
    again: bool = False,
    dtype: str | None = None,
    base: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    progress: Progress | bool | UI = False,
) -> "dict[str, Scores]":
    """Measure what the recipe of a run names, as `pi-lora eval all` does, and keep the scores in the run.

    Args:
        run: A run: a folder, a hub id, or what `train` returns.
        data: Measure perplexity on this text instead of the run's.
        again: Measure again what has scores.
        dtype: The dtype of the weights, as for `load`.
        base: Where the base of the run is now, if it moved.
        permissions: Whether code of the model may run, and a run be used whose base changed.
        progress: Whether to show a progress bar, or a function that is called with the work done and all work.

    Raises:
        PiLoraError: The run, the base or the data cannot be read.
    """
    ui = _ui(progress)
    name = _name(run)
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.suite import requested_of_run, scores_of, scores_table
        from pi_lora.models.source import run_folder
        from pi_lora.run import TUNED, Run

        folder = Run(run_folder(name))

    def resolve_run() -> "ModelSource":
        source = resolve(name, base=base, permissions=permissions)
        _join_launched_processes()
        return source

    requested = requested_of_run(folder, data)
    options = MeasureOptions(again=again, dtype=_dtype(dtype))
    scores = scores_of(folder, TUNED, requested, resolve_run, options=options, ui=ui)
    for each in scores.values():
        ui.show_table(scores_table([each]))
    ui.say(f"{folder.path}: its scores are kept; to put them into its card: pi-lora report {folder.path}")
    return scores


def probe(
    model: AnyModel,
    target: int | Sequence[int] | None = None,
    *,
    dtype: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    json: FilePath | None = None,
    progress: Progress | bool | UI = False,
    **options: Any,
) -> "Probe":
    """Measure before any tuning which scaling suits a model, as `pi-lora probe` does.

    Args:
        model: A plain base.
        target: L', the window to extend to, in tokens; several to see how far the model reaches.
        dtype: The dtype of the weights; by default bfloat16 where it is fast.
        permissions: Whether code of the model may run.
        json: A file to write the probe to, for `new` and `extend`.
        progress: Whether to show a progress bar, or a function that is called with the work done and all work.
        options: The options of the command: `data`, `scalings`, `documents`, `trials`, `seed`, `column`.

    Raises:
        PiLoraError: An option is wrong, the model is a run, or a scaling does not suit it.
    """
    ui = _ui(progress)
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.probe import next_command, probe, probe_table
        from pi_lora.recipe.evaluation import ProbeOptions

        values = dict(options)
        if target is not None:
            values["target"] = [target] if isinstance(target, int) else list(target)
        section = _section(ProbeOptions, values)
        source = resolve(model, permissions=permissions)
        _join_launched_processes()
    file = _path(json) if json else None
    probed = probe(source, section, json=file, dtype=_dtype(dtype), ui=ui)
    for result in probed.targets:
        ui.show_table(probe_table(probed, result))
        ui.show(f"{result.summary}; {'no tuning is needed' if result.enough else 'tuning can add to it'}:")
        ui.copy(next_command(probed, result, file))
    return probed


def compare(
    base: AnyModel,
    run: AnyModel,
    *,
    data: str | None = None,
    another: bool = False,
    chat: str | None = None,
    again: bool = False,
    dtype: str | None = None,
    moved_base: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    json: FilePath | None = None,
    progress: Progress | bool | UI = False,
) -> "Comparison":
    """Compare a run with its base as `pi-lora compare` does: what the extension gained and cost, with intervals.

    Args:
        base: The base of the run.
        run: A run: a folder, a hub id, or what `train` returns.
        data: Measure perplexity on this text instead of the run's.
        another: Allow another model than the one that `run` was tuned from.
        chat: Also measure the assistant's turns of these chats.
        again: Measure again what has scores.
        dtype: The dtype of the weights, as for `load`.
        moved_base: Where the base of the run is now, if it moved.
        permissions: Whether code of the models may run, and a run be used whose base changed.
        json: A file to write the comparison to.
        progress: Whether to show a progress bar, or a function that is called with the work done and all work.

    Raises:
        ModelError: `base` is not the base of the run.
        PiLoraError: A measurement cannot be made.
    """
    ui = _ui(progress)
    with ui.working(LIBRARIES):
        from pi_lora.distributed import is_main_process
        from pi_lora.recipe.evaluation import ChatOptions
        from pi_lora.report.comparison import compare_run, comparison_table
        from pi_lora.storage import check_can_write, write_json

    def resolve_named(name: str) -> "ModelSource":
        source = resolve(name, base=moved_base, permissions=permissions)
        _join_launched_processes()
        return source

    file = _path(json) if json else None
    check_can_write(file)
    comparison = compare_run(
        resolve_named(_name(base)),
        _name(run),
        resolve_named,
        {"chat": ChatOptions(data=chat, base=_name(base))} if chat else {},
        data=data,
        another=another,
        options=MeasureOptions(again=again, dtype=_dtype(dtype)),
        ui=ui,
    )
    ui.show_table(comparison_table(comparison))
    if file and is_main_process():
        write_json(file, comparison.model_dump())
    return comparison


def merge(
    run: AnyModel,
    output: FilePath | None = None,
    *,
    base: str | None = None,
    dtype: str | None = None,
    check: Literal["tensors", "logits", "none"] = "tensors",
    sibling: bool = False,
    reference: bool = False,
    permissions: Permissions = NO_PERMISSIONS,
    progress: Progress | bool | UI = False,
) -> "Merged":
    """Add an adapter to the weights of its base as `pi-lora merge` does, and check the sum. Every engine loads
    the folder of full weights with its scaling.

    Args:
        run: A run of lora or qlora tuning: a folder, a hub id, or what `train` returns.
        output: The new folder; by default `models/<run>`.
        base: Where the base of the run is now, if it moved; or the sibling of the base.
        dtype: `float32`, `bfloat16` or `float16`; by default what the base stores.
        check: Compare the written tensors with base + adapter, or their logits too, or nothing.
        sibling: `base` is another model of the family of the base, such as its instruct model.
        reference: Also write the answers that `check_server` compares into the folder.
        permissions: Whether code of the model may run, and a run be used whose base changed.
        progress: Whether to show a progress bar, or a function that is called with the bytes done and all bytes.

    Returns:
        The `folder` of full weights, `lines` of what was checked, and the commands that serve the folder (`serving`).

    Raises:
        ModelError: `run` is no adapter folder, its base is missing or another one, or the check failed.
        RunExistsError: `output` exists.
    """
    ui = _ui(progress)
    with ui.working(LIBRARIES):
        from pi_lora.merging.merging import MERGE_FILE, Merged, plan_merge
        from pi_lora.models.source import adapter_folder
        from pi_lora.report.card import CARD, card_of
        from pi_lora.report.scores import MeasuredRun
        from pi_lora.run import check_output, staged
        from pi_lora.serving.check import REFERENCE_FILE
        from pi_lora.serving.commands import serving_lines
        from pi_lora.storage import write_json, write_whole

    name = _name(run)
    folder = _path(output) if output else Path("models") / Path(name).resolve().name
    if adapter_folder(name) is None:
        raise ModelError(f"{name}: holds no adapter; name a run of lora tuning (full tuning needs no merge)")
    if sibling and base is None:
        raise ModelError(f"{name}: --sibling: name the sibling of its base with --base")
    source = resolve(name, base=base, permissions=permissions)
    check_output(folder)
    with ui.progress("merging bytes") as written:
        planned = plan_merge(source, dtype=_dtype(dtype), sibling=sibling)
        with staged(folder) as staging:
            planned.write_small_files(staging)
            merged_run = MeasuredRun(planned.run, merged=staging, base_name=planned.source.base.name)
            card_of(merged_run)  # damaged scores show before the weights are written
            planned.write_weights(staging, check, written)
            card = card_of(merged_run, merged=planned.lines, serving=serving_lines(planned.typed_config))
            write_whole(staging / CARD, card)
            facts = {"base": planned.source.base.name, "run": name, "checks": planned.lines}
            write_json(staging / MERGE_FILE, facts)
    if reference:
        write_reference(folder, folder / REFERENCE_FILE, permissions=permissions, progress=ui)
    for line in planned.lines:
        ui.show(line)
    ui.show(f"{folder}: merged; it loads like any model, its scaling is in config.json")
    merged = Merged(folder, planned.lines, serving_lines(planned.typed_config, folder))
    _show_commands(ui, merged.serving)
    return merged


def extend(
    model: AnyModel,
    output: FilePath,
    *,
    target: int,
    scaling: "Method",
    original: int | None = None,
    probe: FilePath | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    progress: Progress | bool | UI = False,
) -> Path:
    """Write a base with a longer window and no tuning as `pi-lora extend` does, for every engine, and return the
    folder. Weights are hard links where the disk allows it, else copies.

    Args:
        model: A plain base.
        output: The new folder.
        target: L', the window to extend to, in tokens.
        scaling: The scaling of the rotary frequencies.
        original: L, the window of the base, if its config does not say it.
        probe: A file that `probe` wrote: the scores of the scaling go to the card and to `scores/`.
        permissions: Whether code of the model may run.
        progress: Whether to show a progress bar, or a function that is called with the files done and all files.

    Raises:
        ModelError: A file of weights is missing or damaged, or the probe is of another model.
        ScalingError: The model cannot be extended so.
        RunExistsError: `output` exists.
    """
    ui = _ui(progress)
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.probe import read_probe
        from pi_lora.evaluation.suite import write_scores
        from pi_lora.models.saving import link_weights, save_without_weights, weight_files
        from pi_lora.report.card import CARD, card_of
        from pi_lora.report.scores import MeasuredRun
        from pi_lora.run import staged
        from pi_lora.scaling.config import Extension
        from pi_lora.serving.commands import serving_lines
        from pi_lora.storage import write_whole

    source = resolve(model, extension=Extension(target, original, scaling), permissions=permissions)
    folder = _path(output)
    scores = read_probe(_path(probe)).scores_by_stage(source.name, target, scaling) if probe else {}
    files = weight_files(source)
    with staged(folder) as staging, ui.progress("linking weights") as linked:
        run = MeasuredRun(staging, untuned=True, base_name=source.base.name)
        save_without_weights(source, source.config, staging)
        for stage, measured in scores.items():
            for each in measured:
                write_scores([each], run.scores_file(each.measurement, stage))
        write_whole(staging / CARD, card_of(run, serving=serving_lines(source.typed_config)))
        link_weights(files, staging, linked)
    ui.show(f"{folder}: written; it loads like any model, its scaling is in config.json")
    _show_commands(ui, serving_lines(source.typed_config, folder))
    return folder


def export_gguf(
    model: AnyModel,
    output: FilePath | None = None,
    *,
    converter: FilePath | None = None,
    dtype: str | None = None,
    progress: Progress | bool | UI = False,
) -> Path:
    """Convert a model, or a run after merging it, with llama.cpp's converter, set its window, and return the file.

    Args:
        model: The model or run.
        output: The file; by default `models/<model>.gguf`.
        converter: The folder of llama.cpp; by default `$LLAMA_CPP`.
        dtype: `f32`, `f16`, `bf16` or `q8_0`; by default the dtype of the weights.
        progress: Whether to show a progress bar, or a function that is called with the bytes done and all bytes.

    Raises:
        ModelError: There is no converter, it drops the scaling of the model, or it fails.
        RunExistsError: `output` exists.
    """
    ui = _ui(progress)
    with ui.working(LIBRARIES):
        from pi_lora.serving.commands import llama_cpp_lines
        from pi_lora.serving.gguf import export_gguf, find_converter
    source = resolve(model)
    name = Path(source.name).resolve().name.rpartition(":")[2]  # builtin:tiny is tiny
    file = _path(output) if output else Path("models") / f"{name.removesuffix('.gguf')}.gguf"
    script = find_converter(source, file, _path(converter) if converter else None)
    file.parent.mkdir(parents=True, exist_ok=True)
    with ui.progress("exporting") as done, TemporaryDirectory(prefix=f".{name}.", dir=file.parent) as temporary:
        full = resolve(merge(source, Path(temporary, name), progress=done).folder) if source.adapter else source
        done(0, 0, "converting")
        export_gguf(full, file, script, dtype)
    ui.show(f"{file}: written for llama.cpp, with a window of {source.window:,} tokens")
    _show_commands(ui, llama_cpp_lines(file, source.window, source.name))
    return file


def check_server(
    url: str,
    model: AnyModel | None = None,
    *,
    reference: FilePath | None = None,
    text: FilePath | None = None,
    served: str | None = None,
    tolerance: float = 0.1,
    dtype: str | None = None,
    base: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    json: FilePath | None = None,
    progress: Progress | bool | UI = False,
) -> "list[Verdict]":
    """Check whether a running server computes a model beyond its original window, as `pi-lora check-server` does.

    Args:
        url: The server, as `http://localhost:8000`.
        model: The model that the server should compute; its answers are computed here.
        reference: The answers of a model that `write_reference` wrote, instead of `model`.
        text: A file of text that is longer than the window; by default made-up sentences.
        served: The server's name of the model, if the server has several.
        tolerance: The mean difference of log probabilities that is allowed, in nats.
        dtype: The dtype of the weights, as for `load`.
        base: Where the base of a run is now, if it moved.
        permissions: Whether code of the model may run, and a run be used whose base changed.
        json: A file to write the verdicts to.
        progress: Whether to show a progress bar, or a function that is called with notes.

    Raises:
        PiLoraError: The server cannot be reached, or the model or reference cannot be read.
    """
    ui = _ui(progress)
    if (model is None) == (reference is None):
        raise PiLoraError("check-server: takes a model or a reference; give one of the two")
    with ui.working(LIBRARIES):
        from pi_lora.serving import check
        from pi_lora.storage import check_can_write, read_json, write_json

    file = _path(json) if json else None
    check_can_write(file)
    with ui.progress("checking") as note:
        answer = check.stored_answer
        if reference:
            server = check.Server(url, served)
            known = read_json(_path(reference), check.Reference, "write it again with --write-reference")
        else:
            computer = _reference_computer(model, text, dtype=dtype, base=base, permissions=permissions, progress=note)
            server = check.Server(url, served)
            known, answer = computer.reference, computer.answer
        verdicts = check.check_server(server, known, answer=answer, tolerance=tolerance, progress=note)
    if file:
        right = all(verdict.verdict == check.RIGHT for verdict in verdicts)
        rows = [verdict.model_dump() for verdict in verdicts]
        write_json(file, {"url": server.url, "model": known.model, "right": right, "prompts": rows})
    ui.show_table(check.verdicts_table(f"{server.url}: {known.model}", verdicts))
    return verdicts


def write_reference(
    model: AnyModel,
    file: FilePath,
    *,
    text: FilePath | None = None,
    dtype: str | None = None,
    base: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    progress: Progress | bool | UI = False,
) -> Path:
    """Compute the answers that `check_server` compares, and write them to a file: then a check needs no weights.

    Args:
        model: The model that servers should compute.
        file: The file to write.
        text: A file of text that is longer than the window; by default made-up sentences.
        dtype: The dtype of the weights, as for `load`.
        base: Where the base of a run is now, if it moved.
        permissions: Whether code of the model may run, and a run be used whose base changed.
        progress: Whether to show a progress bar, or a function that is called with notes.

    Raises:
        PiLoraError: The model or the text cannot be read.
    """
    ui = _ui(progress)
    with ui.working(LIBRARIES):
        from pi_lora.serving import check
        from pi_lora.storage import check_can_write

    path = _path(file)
    check_can_write(path)
    with ui.progress("computing answers") as note:
        computer = _reference_computer(model, text, dtype=dtype, base=base, permissions=permissions, progress=note)
        check.write_reference(computer, path)
    return path


def generate(
    model: AnyModel,
    prompt: str,
    *,
    chat_template: bool = True,
    tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    stream: bool = False,
    dtype: str | None = None,
    base: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    progress: Progress | bool | UI = False,
) -> str:
    """Return the text that a model writes after a prompt, as `pi-lora generate` does.

    Args:
        model: A model, or what `load` returns.
        prompt: The text to answer or to continue.
        chat_template: Put the prompt as the turn of a user, where the tokenizer has a chat template.
        tokens: The longest answer; a shorter one ends with the model's end of text, or with the window.
        temperature: Of sampling; 0 takes the likeliest token.
        seed: Of sampling.
        stream: Also print every word as soon as it is known.
        dtype: The dtype of the weights, as for `load`.
        base: Where the base of a run is now, if it moved.
        permissions: Whether code of the model may run, and a run be used whose base changed.
        progress: A `UI` is shown the work.

    Raises:
        DataError: The prompt is empty, or leaves no room in the window.
        ModelError: The model cannot be found or loaded.
        PiLoraError: An option is wrong.
    """
    ui = _ui(progress)
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.generation import answer
        from pi_lora.recipe.evaluation import Sampling

    sampling = _section(Sampling, {"temperature": temperature, "max_new_tokens": tokens, "seed": seed})
    loaded = _load_shown(model, ui, dtype=dtype, base=base, permissions=permissions)
    return answer(loaded, prompt, sampling, chat_template=chat_template, stream=stream)


def read_prompt(file: FilePath) -> str:
    """Return the text of a file, or of standard input for `-`.

    Args:
        file: The file, or `-`.

    Raises:
        DataError: The file cannot be read, or holds no text.
    """
    from pi_lora.data.documents import read_document

    return read_document(str(file))


def summarize(
    model: AnyModel,
    file: FilePath,
    *,
    dtype: str | None = None,
    base: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    progress: Progress | bool | UI = False,
    **sampling: Any,
) -> str:
    """Return the summary of a document, by the prompt that a model was tuned on, or the paper's; and print the summary
    as it is generated.

    Args:
        model: A model, or what `load` returns.
        file: A file of text, or `-` for standard input.
        dtype: The dtype of the weights, as for `load`.
        base: Where the base of a run is now, if it moved.
        permissions: Whether code of the model may run, and a run be used whose base changed.
        progress: A `UI` is shown the work.
        sampling: `temperature`, `top_p`, `max_new_tokens` and `seed`.

    Raises:
        DataError: The document cannot be read, or the prompt needs more than a document.
        PiLoraError: An option is wrong, or the model cannot be loaded.
    """
    ui = _ui(progress)
    with ui.working(LIBRARIES):
        from pi_lora.data.documents import read_document
        from pi_lora.evaluation.summarization import summarize
        from pi_lora.recipe.evaluation import Sampling

        text = read_document(str(file))
        section = _section(Sampling, sampling)
    loaded = _load_shown(model, ui, dtype=dtype, base=base, permissions=permissions)
    return summarize(loaded, str(file), text, section, ui.say)


def write_report(run: AnyModel, *, html: bool = False) -> list[Path]:
    """Write the model card of a run into its folder, with pictures of its scores and its loss; return the files.

    Args:
        run: The folder of a run that was measured, or what `train` returns.
        html: Also write one HTML page that needs no other file.

    Raises:
        ModelError: The folder is no run that was measured, or pi-lora did not write the card that is there.
    """
    from pi_lora.report import card

    return card.write_report(_path(_name(run)), html=html)


def push(run: AnyModel, repo: str, *, private: bool = False) -> str:
    """Upload a run or a merged model to the Hugging Face hub, with its card and without checkpoints. Return the
    address.

    Args:
        run: A folder, or what `train` returns.
        repo: The repository, as `you/name`; created if it does not exist.
        private: Create a private repository.

    Raises:
        ModelError: The folder is unfinished or lacks a file, or the hub refuses.
    """
    from pi_lora.report.upload import push

    return push(_path(_name(run)), repo, private=private)


def resolve_recipe(recipe: FilePath, *overrides: Override) -> "ResolvedRecipe":
    """Return a recipe with every value, and the origin of each value: `file:line`, the command line, or the default.

    Args:
        recipe: A recipe file, or the name of one that comes with pi-lora.
        overrides: Keys to change, as for `train`.

    Raises:
        RecipeError: All mistakes of the recipe.
    """
    from pi_lora.recipe.files import load_recipe

    return load_recipe(_path(recipe), _as_words(overrides))


def shipped_recipes() -> dict[str, str]:
    """Return the recipes that come with pi-lora: names, and what each makes and needs."""
    from pi_lora.recipe import files

    folder = files.shipped_recipes()
    paths = files.recipe_paths(folder)
    return {str(path.relative_to(folder).with_suffix("")): files.recipe_summary(path) for path in paths}


def recipe_keys() -> str:
    """Return the page of every key that a recipe may have, in Markdown."""
    from pi_lora.recipe.reference import reference_page

    return reference_page()


def theory(
    output: FilePath = "theory",
    *,
    head_dim: int = 128,
    theta: float = 10_000.0,
    original: int = 2048,
    target: int | None = None,
    json: FilePath | None = None,
    progress: Progress | bool | UI = False,
) -> list[Path]:
    """Compute the bounds and draw the figures of the paper (section 2), by default for LLaMA-7B; return the figures.

    Args:
        output: The folder for the figures.
        head_dim: d, the numbers of a head that rotate.
        theta: c, the base of the frequencies.
        original: L in tokens.
        target: L' in tokens; twice L by default.
        json: A file to write the bounds to.
        progress: A `UI` is shown the bounds as a table.

    Raises:
        ScalingError: `target` is not longer than `original`.
    """
    ui = _ui(progress)
    with ui.working("computing the bounds"):
        from dataclasses import asdict

        from pi_lora.storage import write_json
        from pi_lora.theory.bounds import Setting, bounds_of
        from pi_lora.theory.figures import bounds_table, draw_theory

        setting = Setting(head_dim, theta, original, target or 2 * original)
        bounds = bounds_of(setting)
    ui.show_table(bounds_table(setting, bounds))
    with ui.working("drawing"):
        files = list(draw_theory(setting, _path(output)))
    for file in files:
        ui.show(str(file))
    if json:
        write_json(_path(json), {"setting": asdict(setting), "bounds": asdict(bounds)})
    return files


def environment() -> dict[str, str]:
    """Return versions, processor, memory, GPUs and kernels, for a bug report."""
    from pi_lora.models.device import facts
    from pi_lora.storage import cache_folder

    return {**facts(), "cache": str(cache_folder())}


def _ui(progress: Progress | bool | UI) -> UI:
    """Return the functions that show a user what happens."""
    if isinstance(progress, UI):
        return progress
    if progress is True:
        from pi_lora.terminal import progress_bar

        return UI(progress=progress_bar)
    if progress is False:
        return SILENT
    report = progress
    return UI(progress=lambda title: nullcontext(report))


def _path(file: FilePath) -> Path:
    return Path(file).expanduser()


def _name(model: AnyModel) -> str:
    """Return a model as a user names it, with the home folder spelled out."""
    from pi_lora.run import Run

    if isinstance(model, Run):
        return str(model.path)
    if isinstance(model, tuple):
        return str(model.folder)
    if isinstance(model, str | Path):
        name = str(model)
        return str(Path(name).expanduser()) if name.startswith("~") else name
    return model.name


def _dtype(dtype: str | None) -> str | None:
    """Return the full name of a dtype, as of `bf16` or `torch.bfloat16`; raise PiLoraError if there is no such one."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    name = SHORT_DTYPES.get(name, name)
    if name not in SHORT_DTYPES.values():
        raise PiLoraError(f"dtype: {dtype}: is not known; choose from {', '.join(SHORT_DTYPES.values())}")
    return name


def _section(kind: type[SectionT], values: Mapping[str, Any]) -> SectionT:
    """Return options as their section; raise PiLoraError for the first that is wrong."""
    from pydantic import ValidationError

    from pi_lora.storage import first_problem

    try:
        return kind.model_validate({key: _plain(value) for key, value in values.items()})
    except ValidationError as error:
        raise PiLoraError(first_problem(error)) from None


def _plain(value: Any) -> Any:
    """Return paths as text, and other sequences as tuples."""
    if isinstance(value, Path):
        return str(value.expanduser())
    if isinstance(value, str) and value.startswith("~"):
        return str(Path(value).expanduser())
    return tuple(value) if isinstance(value, list) else value


def _as_words(overrides: Sequence[Override]) -> list[str]:
    """Return overrides as on the command line; JSON is YAML.

    >>> _as_words(["scaling=pi", {"training.steps": 100}])
    ['scaling=pi', 'training.steps=100']
    """
    words: list[str] = []
    for override in overrides:
        if isinstance(override, str):
            words.append(override)
        else:
            words += [f"{key}={json_format.dumps(value)}" for key, value in override.items()]
    return words


def _join_launched_processes() -> None:
    """Meet the other processes of this command, if a launcher started several."""
    from pi_lora.distributed import is_launched, join_processes
    from pi_lora.models.device import device

    if is_launched():
        join_processes(cpu=device().type == "cpu")


def _load_shown(
    model: AnyModel, ui: UI, *, dtype: str | None, base: str | None, permissions: Permissions
) -> "LoadedModel":
    """Load a model, and show that this goes on."""
    from pi_lora.models.loaded import LoadedModel, load_model

    if isinstance(model, LoadedModel):
        return model
    source = resolve(model, base=base, permissions=permissions)
    _join_launched_processes()
    with ui.working(f"loading {source.name}"):
        return load_model(source, _dtype(dtype))


def _reference_computer(
    model: AnyModel | None,
    text: FilePath | None,
    *,
    dtype: str | None,
    base: str | None,
    permissions: Permissions,
    progress: Progress,
) -> Any:
    from pi_lora.serving.check import ReferenceComputer

    assert model is not None, "a model or a reference is given"
    words = _path(text).read_text(encoding="utf-8") if text else ""
    source = resolve(model, base=base, permissions=permissions)
    return ReferenceComputer(source, text=words, dtype=_dtype(dtype), progress=progress)


def _show_commands(ui: UI, lines: Sequence[str]) -> None:
    """Show the commands that serve a model, in lines that can be copied."""
    ui.show("")
    ui.copy("Serve it:")
    for line in lines:
        ui.copy(line)
