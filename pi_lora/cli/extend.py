"""`pi-lora train` and `prepare`; `merge`, `extend` and `export gguf`; and `check-server`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

from pi_lora import api
from pi_lora.cli.app import (
    EXTEND,
    FactorsFile,
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
from pi_lora.scaling.config import Method
from pi_lora.terminal import TERMINAL, out
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
    job = api.resolve_training(
        recipe,
        *overrides,
        output=output,
        resume=resume,
        force=force,
        permissions=permissions,
        ask_hub=dry_run,
        progress=TERMINAL,
    )
    if dry_run:
        return
    # A launched process gets the command line as it is.
    launch = api.launch_arguments(job, sys.argv[1:], rank=machine_rank, address=main_process_ip, port=main_process_port)
    api.run_training(job, launch=launch, progress=TERMINAL)


@app.command(group=EXTEND)
def merge(
    run: Annotated[Path, Parameter(name="RUN", help="A run or adapter: a folder or a hub id.")],
    /,
    *,
    loading: Loaded = Loading(),
    reference: Annotated[bool, Parameter(help="Also write answers for check-server into the folder.")] = False,
    sibling: Annotated[bool, Parameter(help="--base is a sibling of the base it was tuned on.")] = False,
    output: Annotated[Path | None, Parameter(help="A new folder; models/<run> by default.")] = None,
    check: Annotated[
        Literal["tensors", "logits", "none"], Parameter(help="Written tensors, or logits too, against base + adapter.")
    ] = "tensors",
) -> None:
    """Add an adapter to the weights of its base, with the scaling written for every engine."""
    api.merge(
        run,
        output,
        check=check,
        sibling=sibling,
        reference=reference,
        **vars(loading),
        progress=TERMINAL,
    )


@app.command(group=EXTEND)
def extend(
    model: ModelName,
    /,
    *,
    target: NewWindow,
    scaling: Annotated[Method, Parameter(help="What pi-lora probe found best.")],
    original: Original = None,
    factors: FactorsFile = None,
    probe: Probe = None,
    output: Annotated[Path, Parameter(help="A new folder.")],
    permissions: Permitted = NO_PERMISSIONS,
) -> None:
    """Write MODEL with a window of --target tokens and no tuning, for every engine; its weights stay as they are."""
    api.extend(
        model,
        output,
        target=target,
        scaling=scaling,
        original=original,
        factors=factors,
        probe=probe,
        permissions=permissions,
        progress=TERMINAL,
    )


@app.command(group=EXTEND)
def prepare(recipe: RecipeFile, /, *overrides: Override, permissions: Permitted = NO_PERMISSIONS) -> None:
    """Tokenize and pack the training data of RECIPE into the cache; no GPU is needed."""
    api.prepare(recipe, *overrides, permissions=permissions, progress=TERMINAL)


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
    api.export_gguf(model, output, converter=converter, dtype=dtype, progress=TERMINAL)


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
    if write_reference and reference and not url:
        api.write_reference(
            write_reference,
            reference,
            text=text,
            **vars(loading),
            progress=TERMINAL,
        )
        out.lines(f"{reference}: written; pi-lora check-server URL --reference {reference} needs no weights")
        return
    verdicts = api.check_server(
        url,
        model,
        reference=reference,
        text=text,
        served=served,
        tolerance=tolerance,
        **vars(loading),
        json=json,
        progress=TERMINAL,
    )
    sys.exit(any(verdict.verdict != "right" for verdict in verdicts))
