"""Measurements of models and runs, and comparisons."""

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from pi_lora.api.inputs import (
    AnyModel,
    FilePath,
    command,
    dtype_of,
    join_launched_processes,
    name_of,
    optional_name,
    optional_path,
    path_of,
    refuse_options,
    resolve,
    section_of,
)
from pi_lora.errors import PiLoraError
from pi_lora.types import LIBRARIES, NO_PERMISSIONS, Permissions, ui

if TYPE_CHECKING:
    from pi_lora.evaluation.benchmarks import BenchmarkScores
    from pi_lora.evaluation.chat import ChatScores
    from pi_lora.evaluation.context import ContextScores
    from pi_lora.evaluation.measurement import Scores
    from pi_lora.evaluation.passkey import PasskeyScores
    from pi_lora.evaluation.perplexity import PerplexityScores
    from pi_lora.evaluation.ruler import RulerScores
    from pi_lora.evaluation.summarization import SummarizationScores
    from pi_lora.models.source import ModelSource
    from pi_lora.recipe.section import Section
    from pi_lora.report.comparison import Comparison
    from pi_lora.scaling.extension import Extension

# Each function imports what it needs: a plan does without torch.


@overload
def evaluate(model: AnyModel, measurement: Literal["perplexity"], **options: Any) -> "PerplexityScores": ...
@overload
def evaluate(model: AnyModel, measurement: Literal["context"], **options: Any) -> "ContextScores": ...
@overload
def evaluate(model: AnyModel, measurement: Literal["passkey"], **options: Any) -> "PasskeyScores": ...
@overload
def evaluate(model: AnyModel, measurement: Literal["benchmarks"], **options: Any) -> "BenchmarkScores": ...
@overload
def evaluate(model: AnyModel, measurement: Literal["ruler"], **options: Any) -> "RulerScores": ...
@overload
def evaluate(model: AnyModel, measurement: Literal["summarization"], **options: Any) -> "SummarizationScores": ...
@overload
def evaluate(model: AnyModel, measurement: Literal["chat"], **options: Any) -> "ChatScores": ...
@overload
def evaluate(model: AnyModel, measurement: str, **options: Any) -> "Scores": ...
@command
def evaluate(
    model: AnyModel,
    measurement: str,
    *,
    extension: "Extension | None" = None,
    dtype: str | None = None,
    base: FilePath | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    json: FilePath | None = None,
    progress: bool = False,
    **options: Any,
) -> "Scores":
    """Measure a model as `pi-lora eval MEASUREMENT` does. An interrupted measurement continues when it is called again.

    Args:
        model: The model, or what `load` returns.
        measurement: `perplexity`, `context`, `passkey`, `benchmarks`, `ruler`, `summarization` or `chat`.
        extension: How to extend a plain base, such as `Extension(target=16384)`.
        dtype: The dtype of the weights, as for `load`.
        base: Where the base of a run is now, if it moved.
        permissions: Whether code of the model may run, and a run be used whose base changed.
        json: A file to write the scores to.
        progress: Whether to show a progress bar.
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


@command
def evaluate_models(
    models: Sequence[AnyModel],
    measurement: str,
    options: "Section | Mapping[str, Any]",
    *,
    extension: "Extension | None" = None,
    dtype: str | None = None,
    base: FilePath | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    json: FilePath | None = None,
    progress: bool = False,
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
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.suite import MEASUREMENTS, evaluate, scores_table
        from pi_lora.models.loaded import LoadedModel

        if measurement not in MEASUREMENTS:
            raise PiLoraError(f"{measurement}: no such measurement; choose from {', '.join(MEASUREMENTS)}")
        section = section_of(MEASUREMENTS[measurement].options, options) if isinstance(options, Mapping) else options
        resolved: list[ModelSource | LoadedModel] = []
        for model in models:
            if isinstance(model, LoadedModel):
                refuse_options(model, extension=extension, dtype=dtype, base=base)
                resolved.append(model)
            else:
                resolved.append(resolve(model, extension=extension, base=base, permissions=permissions))
        join_launched_processes()
    files = {measurement: path_of(json)} if json else {}
    scores = evaluate(resolved, {measurement: section}, files, dtype=dtype_of(dtype))[measurement]
    ui.show_table(scores_table(scores))
    return scores


@command
def evaluate_perplexity(
    model: AnyModel,
    data: FilePath | None = None,
    windows: Sequence[int] | None = None,
    *,
    stride: int | None = None,
    documents: int | None = None,
    truncate: int | None = None,
    progress: bool = False,
) -> "PerplexityScores":
    """Measure sliding-window perplexity as `pi-lora eval perplexity` does (paper, section 3.2).

    Args:
        model: A model, or what `load` returns.
        data: A file, folder, glob or hub data set; `builtin:stdlib`, `pg19` or `proof-pile`; by default what the recipe
            of a run names, and of the built-in model `builtin:stdlib`.
        windows: Lengths in tokens; by default the model's window and its halves down to 256.
        stride: Tokens that a window moves; by default 256, or half the shortest window where that is less.
        documents: Only the first so many that are at least as long as the longest window.
        truncate: Read this many tokens of a document, from the start; by default all.
        progress: Whether to show a progress bar.

    Returns:
        Scores whose `windows` hold the `perplexity` of each length, and the number of `tokens` that it is the mean of.

    Raises:
        DataError: `data` is missing or cannot be read, or no document is as long as the longest window.
        ModelError: The model cannot be found or loaded.
        PiLoraError: An option is wrong.
    """
    return evaluate(
        model,
        "perplexity",
        data=data,
        windows=windows,
        stride=stride,
        documents=documents,
        truncate=truncate,
        progress=progress,
    )


@command
def evaluate_passkey(
    model: AnyModel,
    target: int | None = None,
    *,
    depths: int = 32,
    trials: int = 10,
    seed: int = 0,
    progress: bool = False,
) -> "PasskeyScores":
    """Measure passkey retrieval as `pi-lora eval passkey` does (paper, section 3.3).

    Args:
        model: A model, or what `load` returns.
        target: Tokens of context, prompt and answer together; by default the model's window.
        depths: Distances between passkey and question, evenly spaced to `target`.
        trials: Random passkeys at each.
        seed: Of the passkeys.
        progress: Whether to show a progress bar.

    Returns:
        Scores with the `success_rate` at each of `depths`, and `k_max`, the distance in tokens up to which each is
        retrieved in at least a fifth of the trials.

    Raises:
        ModelError: The model cannot be found or loaded.
        PiLoraError: An option is wrong.
    """
    return evaluate(
        model,
        "passkey",
        target=target,
        depths=depths,
        trials=trials,
        seed=seed,
        progress=progress,
    )


@command
def evaluate_run(
    run: AnyModel,
    *,
    data: FilePath | None = None,
    again: bool = False,
    dtype: str | None = None,
    base: FilePath | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    progress: bool = False,
) -> "dict[str, Scores]":
    """Measure what the recipe of a run names, as `pi-lora eval all` does, and keep the scores in the run.

    Args:
        run: A run: a folder, a hub id, or what `train` returns.
        data: Measure perplexity on this text instead of the run's.
        again: Measure again what has scores.
        dtype: The dtype of the weights, as for `load`.
        base: Where the base of the run is now, if it moved.
        permissions: Whether code of the model may run, and a run be used whose base changed.
        progress: Whether to show a progress bar.

    Raises:
        PiLoraError: The run, the base or the data cannot be read.
    """
    name = name_of(run)
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.suite import requested_of_run, scores_of, scores_table
        from pi_lora.models.resolve import run_folder
        from pi_lora.run import TUNED, Run

        folder = Run(run_folder(name))
        join_launched_processes()
    resolve_run = partial(resolve, name, base=base, permissions=permissions)
    requested = requested_of_run(folder, optional_name(data))
    scores = scores_of(folder, TUNED, requested, resolve_run, again=again, dtype=dtype_of(dtype))
    for each in scores.values():
        ui.show_table(scores_table([each]))
    ui.say(_saved(folder.path))
    return scores


@command
def compare(
    base: AnyModel,
    run: AnyModel,
    *,
    data: FilePath | None = None,
    another: bool = False,
    untuned: bool = True,
    chat: FilePath | None = None,
    again: bool = False,
    dtype: str | None = None,
    moved_base: FilePath | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    json: FilePath | None = None,
    progress: bool = False,
) -> "Comparison":
    """Compare a run with its base as `pi-lora compare` does: what the extension gained and cost, with intervals.

    Args:
        base: The base of the run.
        run: A run: a folder, a hub id, or what `train` returns.
        data: Measure perplexity on this text instead of the run's.
        another: Allow another model than the one that `run` was tuned from.
        untuned: Compare also with the base under the scaling of the run, without tuning.
        chat: Also measure the assistant's turns of these chats.
        again: Measure again what has scores.
        dtype: The dtype of the weights, as for `load`.
        moved_base: Where the base of the run is now, if it moved.
        permissions: Whether code of the models may run, and a run be used whose base changed.
        json: A file to write the comparison to.
        progress: Whether to show a progress bar.

    Returns:
        The comparison: the `verdict` in words, and `rows` with a metric of the base and of the run.

    Raises:
        ModelError: `base` is not the base of the run.
        PiLoraError: A measurement cannot be made.
    """
    with ui.working(LIBRARIES):
        from pi_lora.distributed import is_main_process
        from pi_lora.models.resolve import run_folder
        from pi_lora.recipe.evaluation import ChatOptions
        from pi_lora.report.comparison import compare_run, comparison_table
        from pi_lora.run import SCORES
        from pi_lora.storage import check_can_write, write_json

        join_launched_processes()
    resolve_named = partial(resolve, base=moved_base, permissions=permissions)
    file = optional_path(json)
    check_can_write(file)
    scores = run_folder(name_of(run)) / SCORES
    kept = set(scores.glob("*"))
    requested = {"chat": ChatOptions(data=name_of(chat), base=name_of(base))} if chat else {}
    comparison = compare_run(
        resolve_named(name_of(base)),
        name_of(run),
        resolve_named,
        requested,
        data=optional_name(data),
        another=another,
        untuned=untuned,
        again=again,
        dtype=dtype_of(dtype),
    )
    ui.show_table(comparison_table(comparison))
    if set(scores.glob("*")) != kept:
        ui.say(_saved(scores.parent))
    if file and is_main_process():
        write_json(file, comparison.model_dump())
    return comparison


def _saved(run: Path) -> str:
    """Return the line that says where the scores of a run are, and how they get into the card."""
    return f"{run}: the scores are saved; to show them in the card: pi-lora report {shlex.quote(str(run))}"
