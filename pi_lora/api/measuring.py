"""Measurements of models and runs, and comparisons."""

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi_lora.api.inputs import (
    AnyModel,
    FilePath,
    command,
    join_launched_processes,
    name_of,
    optional_name,
    optional_path,
    path_of,
    ref_of,
    resolve,
    section_of,
)
from pi_lora.errors import PiLoraError
from pi_lora.types import LIBRARIES, ui

if TYPE_CHECKING:
    from pi_lora.evaluation.measurement import Scores
    from pi_lora.report.comparison import Comparison

# Each function imports what it needs: a plan does without torch.


@command
def evaluate(
    models: AnyModel | list[Any] | tuple[Any, ...],
    measurement: str,
    *,
    json: FilePath | None = None,
    progress: bool = False,
    **options: Any,
) -> Any:
    """Measure a model, or several with the same options, as `pi-lora eval MEASUREMENT` does. An interrupted measurement
    continues when it is called again.

    Args:
        models: A model, or a list of models. A model that `load` returned is not read again.
        measurement: `perplexity`, `context`, `passkey`, `benchmarks`, `ruler`, `summarization` or `chat`.
        json: A file to write the scores to.
        progress: Whether to show a progress bar.
        options: The options of the command, such as `windows=[4096, 8192]`.

    Returns:
        The scores of the model, or of a list of models the list of their scores. Those of `perplexity` have `windows`
        with the `perplexity` of each length, those of `passkey` the `success_rate` at each of `depths`, and `k_max`,
        the distance in tokens up to which each is retrieved in at least a fifth of the trials.

    Raises:
        PiLoraError: An option is wrong, or a model or the data cannot be read.
    """
    given = models if isinstance(models, list | tuple) else [models]
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.suite import MEASUREMENTS, evaluate, scores_table
        from pi_lora.models.loaded import LoadedModel

        if measurement not in MEASUREMENTS:
            raise PiLoraError(f"{measurement}: no such measurement; choose from {', '.join(MEASUREMENTS)}")
        section = section_of(MEASUREMENTS[measurement].options, options)
        resolved = [model if isinstance(model, LoadedModel) else resolve(model) for model in given]
        join_launched_processes()
    files = {measurement: path_of(json)} if json else {}
    scores = evaluate(resolved, {measurement: section}, files)[measurement]
    ui.show_table(scores_table(scores))
    return scores if given is models else scores[0]


@command
def evaluate_run(
    run: AnyModel,
    *,
    data: FilePath | None = None,
    force_remeasure: bool = False,
    progress: bool = False,
) -> "dict[str, Scores]":
    """Measure what the recipe of a run names, as `pi-lora eval all` does, and keep the scores in the run.

    Args:
        run: A run: a folder, a hub id, or what `train` returns.
        data: Measure perplexity on this text instead of the run's.
        force_remeasure: Measure again what has scores.
        progress: Whether to show a progress bar.

    Raises:
        PiLoraError: The run, the base or the data cannot be read.
    """
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.suite import requested_of_run, scores_of, scores_table
        from pi_lora.models.resolve import run_folder
        from pi_lora.run import TUNED, Run

        folder = Run(run_folder(name_of(run)))
        join_launched_processes()
    requested = requested_of_run(folder, optional_name(data))
    scores = scores_of(folder, TUNED, requested, partial(resolve, run), again=force_remeasure)
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
    include_untuned: bool = True,
    allow_other_base: bool = False,
    chat: FilePath | None = None,
    force_remeasure: bool = False,
    json: FilePath | None = None,
    progress: bool = False,
) -> "Comparison":
    """Compare a run with its base as `pi-lora compare` does: what the extension gained and cost, with intervals.

    Args:
        base: The base of the run; a `ModelRef` with the same dtype as `run`.
        run: A run: a folder, a hub id, or what `train` returns.
        data: Measure perplexity on this text instead of the run's.
        include_untuned: Compare also with the base under the scaling of the run, without tuning.
        allow_other_base: Allow another model than the one that `run` was tuned from.
        chat: Also measure the assistant's turns of these chats.
        force_remeasure: Measure again what has scores.
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
    dtypes = [ref.dtype or "by default" for ref in map(ref_of, (base, run))]
    if len({*dtypes}) > 1:
        raise PiLoraError(f"compare: dtype {dtypes[0]} of base, {dtypes[1]} of run; give both models the same")
    file = optional_path(json)
    check_can_write(file)
    scores = run_folder(name_of(run)) / SCORES
    kept = set(scores.glob("*"))
    requested = {"chat": ChatOptions(data=name_of(chat), divergence_from=name_of(base))} if chat else {}
    comparison = compare_run(
        resolve(base),
        name_of(run),
        partial(resolve, run),
        requested,
        data=optional_name(data),
        another=allow_other_base,
        untuned=include_untuned,
        again=force_remeasure,
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
