"""`pi-lora train` and `prepare`; `merge`, `extend` and `export gguf`; and `check-server`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

from pi_lora import api
from pi_lora.cli.app import (
    EXTEND,
    GROUP,
    DtypeName,
    FactorsFile,
    JsonFile,
    Loaded,
    LoadOptions,
    ModelName,
    OfRun,
    Original,
    Override,
    Probe,
    RecipeFile,
    RunOptions,
    ScalingOptions,
    Target,
    TrustCode,
    app,
)
from pi_lora.errors import PiLoraError
from pi_lora.scaling.scalings import Method
from pi_lora.terminal import out
from pi_lora.types import NO_PERMISSIONS, Engine, Permissions


@app.command(group=EXTEND)
def train(
    recipe: RecipeFile,
    /,
    *overrides: Override,
    permissions: Annotated[Permissions, GROUP] = NO_PERMISSIONS,
    output: Annotated[Path | None, Parameter(help="Run folder; adapters/<recipe> by default.")] = None,
    resume: Annotated[bool, Parameter(help="Continue an interrupted run; RECIPE may be its folder.")] = False,
    dry_run: Annotated[bool, Parameter(help="Check recipe, model, data and output, then stop.")] = False,
    force: Annotated[bool, Parameter(help="Train even if the plan does not fit.")] = False,
    machine_rank: Annotated[NonNegativeInt, Parameter(help="Number of this machine, from 0.")] = 0,
    main_process_ip: Annotated[str | None, Parameter(help="Address of machine 0.")] = None,
    main_process_port: Annotated[PositiveInt | None, Parameter(help="Port on machine 0.")] = None,
) -> None:
    """Tune a model to the target window of RECIPE."""
    job = api.resolve_training(
        recipe,
        *overrides,
        output=output,
        resume=resume,
        force=force,
        **vars(permissions),
        ask_hub=dry_run,
    )
    if dry_run:
        return
    # A launched process gets the command line as it is.
    launch = api.launch_arguments(job, sys.argv[1:], rank=machine_rank, address=main_process_ip, port=main_process_port)
    api.run_training(job, launch=launch)


@app.command(group=EXTEND)
def merge(
    run: Annotated[Path, Parameter(name="RUN", help="Folder or hub id of a run or adapter.")],
    /,
    *,
    options: OfRun = RunOptions(),
    dtype: DtypeName = None,
    reference: Annotated[bool, Parameter(help="Also write answers for check-server into the folder.")] = False,
    output: Annotated[Path | None, Parameter(help="New folder; models/<run> by default.")] = None,
    check: Annotated[
        Literal["tensors", "logits", "none"], Parameter(help="Compare tensors, or logits too, with base + adapter.")
    ] = "tensors",
) -> None:
    """Add an adapter to the weights of its base, with the scaling written for every engine."""
    api.merge(options.ref(run), output, dtype=dtype, check=check, reference=reference)


@app.command(group=EXTEND)
def extend(
    model: ModelName,
    /,
    *,
    target: Target = None,
    scaling: Annotated[
        Method | None, Parameter(help="Scaling of the rotary frequencies; pi-lora probe finds the best.")
    ] = None,
    original: Original = None,
    factors: FactorsFile = None,
    probe: Probe = None,
    output: Annotated[Path | None, Parameter(help="New folder.")] = None,
    engine: Annotated[
        Engine | None,
        Parameter(name="--print", help="Print how this engine serves MODEL as it is, or a run on its base."),
    ] = None,
    options: OfRun = RunOptions(),
) -> None:
    """Write MODEL with a window of --target tokens for every engine, without tuning; the weights do not change."""
    if bool(target) != bool(scaling) or bool(engine) == bool(output):
        raise PiLoraError("extend: needs --target with --scaling, and either --output or --print")
    extension = ScalingOptions(original, scaling, factors).extension(target) if target else None
    ref = options.ref(model, extension)
    if output:
        api.extend(ref, output, probe=probe)
    elif engine:
        out.commands(*api.override_lines(ref, engine))


@app.command(group=EXTEND)
def prepare(recipe: RecipeFile, /, *overrides: Override, trust_remote_code: TrustCode = False) -> None:
    """Tokenize and pack the training data of RECIPE into the cache; no GPU is needed."""
    api.prepare(recipe, *overrides, trust_remote_code=trust_remote_code)


export_app = App(name="export", help="Write a model in the format of another engine.", group=EXTEND)
app.command(export_app)


@export_app.command
def gguf(
    model: ModelName,
    /,
    *,
    output: Annotated[Path | None, Parameter(help="New file; models/<model>.gguf by default.")] = None,
    converter: Annotated[Path | None, Parameter(help="Folder of llama.cpp; $LLAMA_CPP by default.")] = None,
    dtype: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"] | None, Parameter(help="Data type; by default that of the weights.")
    ] = None,
    options: OfRun = RunOptions(),
) -> None:
    """Convert a model to GGUF with llama.cpp's converter, and set the window; a run is merged first."""
    api.export_gguf(options.ref(model), output, converter=converter, dtype=dtype)


@app.command(name="check-server", group=EXTEND)
def check_server(
    url: Annotated[str | None, Parameter(name="URL", help="Server, as http://localhost:8000.")] = None,
    model: Annotated[str | None, Parameter(name="MODEL", help="Hub id, folder, run or builtin:tiny.")] = None,
    /,
    *,
    text: Annotated[Path | None, Parameter(help="Text longer than the window; generated sentences by default.")] = None,
    reference: Annotated[Path | None, Parameter(help="File with the answers of a model, instead of MODEL.")] = None,
    write_reference: Annotated[str | None, Parameter(help="Write this model's answers to --reference.")] = None,
    served: Annotated[str | None, Parameter(help="Name of the model on a server with several.")] = None,
    tolerance: Annotated[float, Parameter(help="Largest mean difference of log probabilities, in nats.")] = 0.1,
    json: JsonFile = None,
    options: Loaded = LoadOptions(),
) -> None:
    """Check whether a running server computes a model beyond its original window; exit with 1 if it does not."""
    if write_reference and reference and not url:
        api.write_reference(options.ref(write_reference), reference, text=text)
        out.lines(f"{reference}: written; pi-lora check-server URL --reference {reference} needs no weights")
        return
    verdicts = api.check_server(
        url,
        options.ref(model) if model else None,
        reference=reference,
        text=text,
        served=served,
        tolerance=tolerance,
        json=json,
    )
    sys.exit(any(verdict.verdict != "right" for verdict in verdicts))
