"""`pi-lora train` and `prepare`; `merge`, `extend` and `export gguf`; and `check-server`."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

from pi_lora.cli.app import (
    EXTEND,
    JsonFile,
    Loaded,
    Loading,
    ModelName,
    NewWindow,
    Original,
    Override,
    Permitted,
    Probe,
    RecipeFile,
    app,
)
from pi_lora.distributed import is_launched, is_main_process, launch, launch_arguments
from pi_lora.errors import PiLoraError
from pi_lora.scaling.config import Extension, Method
from pi_lora.storage import cache_folder, check_can_write, read_json, write_json
from pi_lora.terminal import out, progress_bar, working
from pi_lora.types import NO_PERMISSIONS


@app.command(group=EXTEND)
def train(
    recipe: RecipeFile,
    /,
    *overrides: Override,
    permissions: Permitted = NO_PERMISSIONS,
    output: Annotated[Path | None, Parameter(help="The run folder; adapters/<recipe> by default.")] = None,
    resume: Annotated[bool, Parameter(help="Continue an interrupted run, by its recipe or its folder.")] = False,
    dry_run: Annotated[bool, Parameter(help="Check recipe, model, data and output, then stop.")] = False,
    force: Annotated[bool, Parameter(help="Train even if the plan says that it does not fit.")] = False,
    machine_rank: Annotated[NonNegativeInt, Parameter(help="Number of this machine, from 0.")] = 0,
    main_process_ip: Annotated[str | None, Parameter(help="Address of machine 0.")] = None,
    main_process_port: Annotated[PositiveInt | None, Parameter(help="Port on machine 0.")] = None,
) -> None:
    """Tune a model to its target window by RECIPE."""
    from pi_lora.run import resolve_run

    resolved, place = resolve_run(recipe, overrides, output, resume)
    # Ctrl-C ends at once until all libraries are imported: some turn it into an error of their own.
    with working():
        from pi_lora.api import model_to_train

        model, lines = model_to_train(resolved, place, resume, force, permissions, ask_hub=dry_run)
        if dry_run:
            out.lines(*lines)
            return
        from pi_lora.training.training import closing_lines, prepare_data, train

    with progress_bar("preparing examples" if resolved.data.has_examples else "packing sequences") as progress:
        data = prepare_data(resolved, model, progress)
    if not is_launched():
        out.lines(*lines, *(f"data: {line}" for line in data.messages))
        if resolved.hardware.processes > 1:
            # A launched process gets the command line as it is; it starts no others.
            sys.exit(launch(launch_arguments(resolved, sys.argv[1:], machine_rank, main_process_ip, main_process_port)))
    with progress_bar("training steps") as progress:
        folder = train(resolved, model, data, place, resume, progress)
    if is_main_process():
        out.lines(*closing_lines(resolved, folder))


@app.command(group=EXTEND)
def merge(
    run: Annotated[Path, Parameter(name="RUN", help="A run or adapter: a folder or a hub id.")],
    /,
    *,
    how: Loaded = Loading(),
    reference: Annotated[bool, Parameter(help="Also write answers for check-server into the folder.")] = False,
    sibling: Annotated[bool, Parameter(help="--base is a sibling of the base it was tuned on.")] = False,
    output: Annotated[Path | None, Parameter(help="A new folder; models/<run> by default.")] = None,
    check: Annotated[
        Literal["tensors", "logits", "none"], Parameter(help="Written tensors, or logits too, against base + adapter.")
    ] = "tensors",
) -> None:
    """Add an adapter to the weights of its base, with the scaling written for every engine."""
    with working():
        from pi_lora.merging.merging import merge
        from pi_lora.models.model import find
        from pi_lora.serving.check import REFERENCE_FILE, Reader
    with progress_bar("merging bytes") as progress:
        to = output or Path("models") / run.resolve().name
        merged = merge(run, to, how.base, how.dtype, check, progress, how.permissions, sibling)
        if reference:
            model = find(str(to), permissions=how.permissions)
            Reader(model, progress=progress).write(to / REFERENCE_FILE)
    out.lines(*merged.lines, f"{to}: merged; it loads like any model, its scaling is in config.json", "")
    out.commands("Serve it:", *merged.serving)


@app.command(group=EXTEND)
def extend(
    model: ModelName,
    /,
    *,
    target: NewWindow,
    scaling: Annotated[Method, Parameter(help="What pi-lora probe found best.")],
    original: Original = None,
    probe: Probe = None,
    output: Annotated[Path, Parameter(help="A new folder.")],
    permissions: Permitted = NO_PERMISSIONS,
) -> None:
    """Write MODEL with a window of --target tokens and no tuning, for every engine; its weights stay as they are."""
    with working():
        from pi_lora.merging.merging import extend
        from pi_lora.models.model import find
        from pi_lora.report.probe import read_probe
    extended = find(model, Extension(target, original, scaling), permissions)
    with progress_bar("linking weights") as progress:
        serving = extend(extended, output, read_probe(probe) if probe else None, progress)
    out.lines(f"{output}: written; it loads like any model, its scaling is in config.json", "")
    out.commands("Serve it:", *serving)


@app.command(group=EXTEND)
def prepare(
    recipe: RecipeFile,
    /,
    *overrides: Override,
    permissions: Permitted = NO_PERMISSIONS,
) -> None:
    """Tokenize and pack the training data of RECIPE into the cache; no GPU is needed."""
    with working():
        from pi_lora.preflight import check_data
        from pi_lora.recipe.files import load_recipe
        from pi_lora.training.training import prepare_data

        resolved = load_recipe(recipe, overrides).recipe
        model = check_data(resolved, permissions)
    with progress_bar("preparing data") as progress:
        data = prepare_data(resolved, model, progress)
    out.lines(*(f"data: {line}" for line in data.messages))
    out.lines(f"{cache_folder()}: has the data of {recipe}; pi-lora train reads it from there")


export_app = App(name="export", help="Write a model in the format of another engine.", group=EXTEND)
app.command(export_app)


@export_app.command
def gguf(
    model: ModelName,
    /,
    *,
    output: Annotated[Path | None, Parameter(help="A file; models/<model>.gguf by default.")] = None,
    converter: Annotated[Path | None, Parameter(help="The folder of llama.cpp; else $LLAMA_CPP.")] = None,
    dtype: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"] | None, Parameter(help="By default that of the weights.")
    ] = None,
) -> None:
    """Convert a model, or a run after merging it, with llama.cpp's converter, and set its window."""
    with working():
        from pi_lora.merging.merging import merge
        from pi_lora.models.model import find
        from pi_lora.serving.commands import llama_cpp_lines
        from pi_lora.serving.gguf import export_gguf, find_converter
    source = find(model)
    name = Path(model).resolve().name.rpartition(":")[2]  # builtin:tiny is tiny
    file = output or Path("models") / f"{name.removesuffix('.gguf')}.gguf"
    script = find_converter(source, file, converter)
    file.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar("exporting") as progress, TemporaryDirectory(prefix=f".{name}.", dir=file.parent) as making:
        if source.adapter:
            source = find(str(merge(Path(model), Path(making, name), progress=progress).folder))
        progress(0, 0, "converting")
        export_gguf(source, file, script, dtype)
    out.lines(f"{file}: written for llama.cpp, with a window of {source.window:,} tokens", "")
    out.commands("Serve it:", *llama_cpp_lines(file, source.window, model))


@app.command(name="check-server", group=EXTEND)
def check_server(
    url: Annotated[str | None, Parameter(name="URL", help="The server, as http://localhost:8000.")] = None,
    model: Annotated[str | None, Parameter(name="MODEL", help="Hub id, folder, run or builtin:tiny.")] = None,
    /,
    *,
    text: Annotated[Path | None, Parameter(help="A text longer than the window; made-up sentences by default.")] = None,
    reference: Annotated[Path | None, Parameter(help="The answers of a model, instead of MODEL.")] = None,
    write_reference: Annotated[str | None, Parameter(help="Compute the answers of this model to --reference.")] = None,
    served: Annotated[str | None, Parameter(help="The server's name of the model, if it has several.")] = None,
    tolerance: Annotated[float, Parameter(help="Mean difference of log probabilities, in nats.")] = 0.1,
    json: JsonFile = None,
    loading: Loaded = Loading(),
) -> None:
    """Check whether a running server computes a model beyond its original window; exit with 1 if it does not."""
    if not (write_reference and reference and not url) and not (url and (model is None) != (reference is None)):
        raise PiLoraError(
            "check-server: takes URL MODEL, URL --reference FILE, or --write-reference MODEL --reference FILE"
        )
    check_can_write(json, reference if write_reference else None)
    with working():
        from pi_lora.serving.check import Reader, Reference, Server, check_server, verdicts_table
    words = text.read_text(encoding="utf-8") if text else ""
    with progress_bar("checking") as progress:
        if named := model or write_reference:
            reader = Reader(loading.find(named)[0], words, loading.dtype, progress)
        if reference and write_reference:
            reader.write(reference)
            out.lines(f"{reference}: written; pi-lora check-server URL --reference {reference} needs no weights")
            return
        server = Server(url or "", served)
        known = read_json(reference, Reference, "write it again with --write-reference") if reference else reader
        verdicts = check_server(server, known, tolerance, progress)
    right = all(verdict.verdict == "right" for verdict in verdicts)
    out.print(verdicts_table(f"{server.url}: {known.model}", verdicts))
    if json:
        rows = [verdict.model_dump() for verdict in verdicts]
        write_json(json, {"url": server.url, "model": known.model, "right": right, "prompts": rows})
    sys.exit(not right)
