"""Models for other engines: merged, extended, exported, and compared with a running server."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pi_lora.api.inputs import (
    AnyModel,
    FilePath,
    command,
    dtype_of,
    name_of,
    optional_path,
    path_of,
    ref_of,
    resolve,
)
from pi_lora.errors import ModelError, PiLoraError
from pi_lora.model_ref import ModelRef
from pi_lora.types import LIBRARIES, Engine, Progress, ui

if TYPE_CHECKING:
    from pi_lora.evaluation.probe import Probe
    from pi_lora.merging.merging import Check, Merged
    from pi_lora.models.source import ModelSource
    from pi_lora.serving.check import Verdict
    from pi_lora.serving.reference import Reference

NOT_EXTENDED = "{}: no extension is given; name a base, with --target and --scaling (Python: ModelRef(extension=...))"

# Each function imports what it needs: a plan does without torch.


@command
def merge(
    run: AnyModel,
    output: FilePath | None = None,
    *,
    dtype: str | None = None,
    check: "Check" = "tensors",
    reference: bool = False,
    progress: bool = False,
) -> "Merged":
    """Add an adapter to the weights of its base as `pi-lora merge` does, and check the sum. Every engine loads
    the folder of full weights with its scaling.

    Args:
        run: A run of lora or qlora tuning: a folder, a hub id, or what `train` returns.
        output: The new folder; by default `models/<run>`.
        dtype: The dtype of the merged weights; by default what the base stores.
        check: Compare the written tensors with base + adapter, or their logits too, or nothing.
        reference: Also write the answers that `check_server` compares into the folder.
        progress: Whether to show a progress bar.

    Returns:
        The `folder` of full weights, `lines` of what was checked, and the commands that serve the folder (`serving`).

    Raises:
        ModelError: `run` is no adapter folder, its base is missing or another one, or the check failed.
        RunExistsError: `output` exists.
    """
    with ui.working(LIBRARIES):
        from pi_lora.merging.merging import CHECKS

    if check not in CHECKS:
        raise PiLoraError(f"check: {check}: is not known; choose from {', '.join(CHECKS)}")
    folder = optional_path(output) or Path("models", Path(name_of(run)).resolve().name)
    source = resolve(run)
    with ui.progress("merging bytes") as written:
        merged = _merge(source, folder, dtype=dtype_of(dtype), check=check, written=written, reference=reference)
    for line in merged.lines:
        ui.show(line)
    ui.show(f"{folder}: merged; it loads like any model, its scaling is in config.json")
    _show_commands(merged.serving)
    return merged


def _merge(
    run: "ModelSource",
    folder: Path,
    *,
    dtype: str | None,
    check: "Check",
    written: Progress,
    reference: bool = False,
) -> "Merged":
    """Write the merged weights of a run with their card into a new folder, and with `reference` the answers for a check
    of servers.
    """
    from pi_lora.merging.merging import Merged, plan_merge
    from pi_lora.models.files import CARD
    from pi_lora.report.card import card_of
    from pi_lora.report.scores import MeasuredRun
    from pi_lora.serving.commands import serving_lines
    from pi_lora.serving.reference import REFERENCE_FILE, compute_answers, reference_of
    from pi_lora.staging import check_output, staged
    from pi_lora.storage import write_whole

    check_output(folder)
    planned = plan_merge(run, dtype=dtype)
    base = run.base.name
    with staged(folder) as staging:
        planned.write_small_files(staging)
        merged_run = MeasuredRun(planned.run, merged=staging, base_name=base)
        card_of(merged_run)  # damaged scores show before the weights are written
        planned.write_weights(staging, check, written)
        if reference:
            answers = reference_of(replace(run, name=str(folder)))
            compute_answers(answers, resolve(ModelRef(staging, **vars(run.permissions))), written)
            write_whole(staging / REFERENCE_FILE, answers.model_dump_json() + "\n")
        planned.write_history(staging)
        write_whole(staging / CARD, card_of(merged_run, serving=serving_lines(planned.typed_config)))
    return Merged(folder, planned.lines, serving_lines(planned.typed_config, folder))


@command
def extend(
    model: AnyModel,
    output: FilePath,
    *,
    probe: FilePath | None = None,
    progress: bool = False,
) -> Path:
    """Write a base with a longer window and no tuning as `pi-lora extend` does, for every engine, and return the
    folder. Weights are hard links where the disk allows it, else copies.

    Args:
        model: A plain base with its extension, as `ModelRef(name, extension=Extension(target=16384, scaling="yarn"))`.
        output: The new folder.
        probe: A file that `probe` wrote: the scores of the scaling go to the card and to `scores/`. It also gives the
            divisors of the scaling `factors`.
        progress: Whether to show a progress bar.

    Raises:
        ModelError: A file of weights is missing or damaged, or the probe is of another model.
        ScalingError: The model cannot be extended so.
        RunExistsError: `output` exists.
    """
    with ui.working(LIBRARIES):
        from pi_lora.evaluation.probe import read_probe
        from pi_lora.evaluation.suite import write_scores
        from pi_lora.models.files import CARD
        from pi_lora.models.loaded import check_shapes
        from pi_lora.models.quantized import check_quantization
        from pi_lora.models.saving import link_weights, save_history, save_without_weights, weight_files
        from pi_lora.report.card import card_of
        from pi_lora.report.scores import MeasuredRun
        from pi_lora.serving.commands import serving_lines
        from pi_lora.staging import staged
        from pi_lora.storage import check_can_make, write_whole

    probed = read_probe(path_of(probe)) if probe else None
    if probed and isinstance(model, ModelRef):
        model = _with_divisors(model, probed)
    source = resolve(model)
    extension = source.extension
    if not extension:
        raise ModelError(NOT_EXTENDED.format(source.name))
    folder = path_of(output)
    scores = {}
    if probed:
        probed.check_is_of(source.base)
        scores = probed.scores_by_stage(extension.target, extension.scaling)
    check_can_make(folder)
    check_quantization(source.base)
    check_shapes(source.base, source.base.read_weights())
    files = weight_files(source)
    with staged(folder) as staging, ui.progress("linking weights") as linked:
        run = MeasuredRun(staging, untuned=True, base_name=source.base.name)
        save_without_weights(source, source.config, staging)
        save_history(source, staging)
        for stage, measured in scores.items():
            for each in measured:
                write_scores([each], run.scores_file(each.measurement, stage))
        write_whole(staging / CARD, card_of(run, serving=serving_lines(source.typed_config)))
        link_weights(files, staging, linked)
    for note in source.notes:
        ui.say(note)
    ui.show(f"{folder}: written; it loads like any model, its scaling is in config.json")
    _show_commands(serving_lines(source.typed_config, folder))
    return folder


@command
def override_lines(model: AnyModel, engine: Engine) -> list[str]:
    """Return the lines with which an engine serves a base as it is under a longer window, as `pi-lora extend --print`
    does. Nothing is written.

    Args:
        model: A plain base with its extension, as for `extend`, or a run or adapter, which is served on its base.
        engine: `vllm`, `sglang` or `llama.cpp` for a command; `mlx` or `transformers` for Python.

    Raises:
        ModelError: The engine does not compute the scaling, or takes no override or adapter of this kind.
        ScalingError: The model cannot be extended so.
    """
    with ui.working(LIBRARIES):
        from pi_lora.serving import overrides

    if engine not in overrides.LINES:
        raise PiLoraError(f"engine: {engine}: is not known; choose from {', '.join(overrides.LINES)}")
    source = resolve(model)
    if not source.adapter and not source.extension:
        raise ModelError(NOT_EXTENDED.format(source.name))
    for note in source.notes:
        ui.say(note)
    return overrides.override_lines(source, engine)


def _with_divisors(model: ModelRef, probed: "Probe") -> ModelRef:
    """Return a model that is extended by `factors` with the divisors of a probe; raise ModelError if it has others."""
    extension = model.extension
    if not extension or extension.scaling != "factors":
        return model
    divisors = probed.at(extension.target).divisors
    measured = replace(extension, **divisors.model_dump()) if divisors else extension
    if extension.factors and extension != measured:
        raise ModelError("--factors: differ from those that --probe measured; leave out one of the two")
    return replace(model, extension=measured)


@command
def export_gguf(
    model: AnyModel,
    output: FilePath | None = None,
    *,
    converter: FilePath | None = None,
    dtype: str | None = None,
    progress: bool = False,
) -> Path:
    """Convert a model, or a run after merging it, with llama.cpp's converter, set its window, and return the file.

    Args:
        model: The model or run.
        output: The file; by default `models/<model>.gguf`.
        converter: The folder of llama.cpp; by default `$LLAMA_CPP`.
        dtype: `f32`, `f16`, `bf16` or `q8_0`; by default the dtype of the weights.
        progress: Whether to show a progress bar.

    Raises:
        ModelError: There is no converter, it drops the scaling of the model, or it fails.
        RunExistsError: `output` exists.
    """
    with ui.working(LIBRARIES):
        from pi_lora.serving.commands import llama_cpp_lines
        from pi_lora.serving.gguf import export_gguf, find_converter
    source = resolve(model)
    name = Path(source.name).resolve().name.rpartition(":")[2]  # builtin:tiny is tiny
    file = optional_path(output) or Path("models", name.removesuffix(".gguf") + ".gguf")
    script = find_converter(source, file, optional_path(converter))
    file.parent.mkdir(parents=True, exist_ok=True)
    with ui.progress("exporting") as done, TemporaryDirectory(prefix=f".{name}.", dir=file.parent) as temporary:
        full = source
        if source.adapter:
            merged = _merge(source, Path(temporary, name), dtype=None, check="tensors", written=done)
            full = resolve(ModelRef(merged.folder, **vars(source.permissions)))
        done(0, 0, "converting")
        export_gguf(full, file, script, dtype)
    ui.show(f"{file}: written for llama.cpp, with a window of {source.window:,} tokens")
    _show_commands(llama_cpp_lines(file, source.window, source.name, ref_of(model).base))
    return file


@command
def check_server(
    url: str | None,
    model: AnyModel | None = None,
    *,
    reference: FilePath | None = None,
    text: FilePath | None = None,
    served: str | None = None,
    tolerance: float = 0.1,
    json: FilePath | None = None,
    progress: bool = False,
) -> "list[Verdict]":
    """Check whether a running server computes a model beyond its original window, as `pi-lora check-server` does.

    Args:
        url: The server, as `http://localhost:8000`.
        model: The model that the server should compute; its answers are computed here.
        reference: The answers of a model that `write_reference` wrote, instead of `model`.
        text: A file of text that is longer than the window; by default made-up sentences.
        served: The server's name of the model, if the server has several.
        tolerance: The mean difference of log probabilities that is allowed, in nats.
        json: A file to write the verdicts to.
        progress: Whether to show a progress bar.

    Raises:
        PiLoraError: The server cannot be reached, or the model or reference cannot be read.
    """
    if not url or (model is None) == (reference is None):
        raise PiLoraError(
            "check-server: takes URL MODEL, URL --reference FILE, or --write-reference MODEL --reference FILE"
        )
    with ui.working(LIBRARIES):
        from pi_lora.serving import check
        from pi_lora.serving.reference import RIGHT, Reference
        from pi_lora.storage import check_can_write, read_json, write_json

    file = optional_path(json)
    check_can_write(file)
    with ui.progress("checking") as note:
        compute = None
        server = check.Server(url, served)
        if reference:
            known = read_json(path_of(reference), Reference, "write it again with --write-reference")
        else:
            known, compute = _reference(model, text, note)
        verdicts = check.check_server(server, known, compute=compute, tolerance=tolerance, progress=note)
    right = all(verdict.verdict == RIGHT for verdict in verdicts)
    if file:
        rows = [verdict.model_dump() for verdict in verdicts]
        write_json(file, {"url": server.url, "model": known.model, "right": right, "prompts": rows})
    ui.show_table(check.verdicts_table(f"{server.url}: {known.model}", verdicts))
    if server.choices and not right:
        choices = ", ".join(server.choices)
        ui.say(f"{server.url}: has several models, and chose one; name one with --served: {choices}")
    return verdicts


@command
def write_reference(
    model: AnyModel,
    file: FilePath,
    *,
    text: FilePath | None = None,
    progress: bool = False,
) -> Path:
    """Compute the answers that `check_server` compares, and write them to a file: then a check needs no weights.

    Args:
        model: The model that servers should compute.
        file: The file to write.
        text: A file of text that is longer than the window; by default made-up sentences.
        progress: Whether to show a progress bar.

    Raises:
        PiLoraError: The model or the text cannot be read.
    """
    with ui.working(LIBRARIES):
        from pi_lora.storage import check_can_write, write_whole

    path = path_of(file)
    check_can_write(path)
    with ui.progress("computing answers") as note:
        known, compute = _reference(model, text, note)
        compute()
    write_whole(path, known.model_dump_json() + "\n")
    return path


def _reference(
    model: AnyModel | None,
    text: FilePath | None,
    progress: Progress,
) -> "tuple[Reference, Callable[[], None]]":
    """Return the prompts for a model, and the function that computes their answers."""
    from pi_lora.serving.reference import compute_answers, reference_of

    assert model is not None, "a model or a reference is given"
    words = path_of(text).read_text(encoding="utf-8") if text else ""
    source = resolve(model)
    reference = reference_of(source, words)
    return reference, partial(compute_answers, reference, source, progress)


def _show_commands(lines: Sequence[str]) -> None:
    """Show the commands that serve a model, in lines that can be copied."""
    ui.show("")
    ui.copy("Serve it:")
    for line in lines:
        ui.copy(line)
