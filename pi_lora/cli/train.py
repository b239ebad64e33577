"""`pi-lora train`."""

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pi_lora.cli.app import (
    AllowChanged,
    Overrides,
    RecipeFile,
    TrustRemoteCode,
    app,
    err,
    out,
    printable,
    progress_bar,
    read_recipe,
    working,
)
from pi_lora.errors import PiLoraError
from pi_lora.types import Allowed

# Text that takes minutes to pack.
MANY_TOKENS = 10**8


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="The run; adapters/<recipe> by default.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue an interrupted run.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Check recipe, model, data and output, then stop.")] = False,
    force: Annotated[bool, typer.Option(help="Train even what the plan says does not fit.")] = False,
    trust_remote_code: TrustRemoteCode = False,
    allow_changed: AllowChanged = False,
    print_launch: Annotated[bool, typer.Option(help="Print the accelerate launch line instead of running it.")] = False,
    num_machines: Annotated[
        int | None, typer.Option(min=1, max=10**6, help="Instead of the recipe's hardware.machines.")
    ] = None,
    machine_rank: Annotated[int, typer.Option(min=0, help="Which of several machines this is.")] = 0,
    main_process_ip: Annotated[str | None, typer.Option(metavar="IP", help="The address of machine 0.")] = None,
    main_process_port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="PORT", help="The port there.")
    ] = None,
) -> None:
    """Tune a model to its target window, as RECIPE says, in as many processes as it asks for."""
    from pi_lora.distributed import check_launched, is_launched, launch, launch_arguments

    changes = (overrides or []) + ([f"hardware.machines={num_machines}"] if num_machines else [])
    resolved = read_recipe(recipe, changes).recipe
    where = (machine_rank, main_process_ip, main_process_port)
    several = resolved.hardware.processes > 1 and not is_launched()
    worker = ["train", str(recipe), *changes, *(["--output", str(output)] if output else [])]
    worker += ["--resume"] * resume + ["--trust-remote-code"] * trust_remote_code + ["--allow-changed"] * allow_changed
    if print_launch:
        print(printable(shlex.join(["accelerate", "launch", *launch_arguments(resolved, worker, *where)])))
        return
    if is_launched():
        check_launched(resolved)
    with working("loading libraries"):
        from pi_lora.distributed import is_leader
        from pi_lora.preflight import check
        from pi_lora.run_folder import output_folder

        place = output or output_folder(resolved, recipe)
        job = check(resolved, place, resume, Allowed(trust_remote_code, allow_changed))
    if not is_launched():
        _show_plan(job, force)
    if dry_run:
        return
    preparing = "preparing examples" if resolved.data.has_examples else "packing tokens"
    with progress_bar(preparing, quiet=not is_leader()) as progress:
        data = job.prepare(progress, missing=partial(_say_what_is_missing, recipe))
    for line in () if is_launched() else data.said:
        out.print(f"data: {line}", soft_wrap=True)
    if several:
        if status := launch(launch_arguments(resolved, worker, *where)):
            raise typer.Exit(status)
        return
    with working("loading libraries"):
        from pi_lora.training.training import train
    with progress_bar("training", quiet=not is_leader()) as progress:
        folder = train(job, progress)
    if is_leader():
        measure = "summarization" if resolved.data.has_examples else "perplexity"
        if job.needs_its_config:
            unscaled = "PEFT puts it on its plain base without the scaling, and only warns"
            out.print(f"{folder}: load it with pi_lora.load, or merge it; {unscaled}", soft_wrap=True)
        command = shlex.join(["pi-lora", "eval", measure, str(folder)])
        out.print(f"{folder}: done; measure it with: {command}", soft_wrap=True)


def _say_what_is_missing(recipe: Path, tokens: int) -> None:
    """Say how to pack much text elsewhere, before it is packed here."""
    if tokens >= MANY_TOKENS:
        prepare = shlex.join(["pi-lora", "prepare", str(recipe)])
        err.print(
            f"data: {tokens:,} tokens are not in the cache and are packed now; without a GPU, in several processes: "
            f"{prepare}",
            soft_wrap=True,
        )


def _show_plan(job: Any, force: bool) -> None:
    """Print what the training takes, or refuse one that does not fit."""
    from pi_lora.planning.text import plan_lines
    from pi_lora.preflight import plan_here

    plan = plan_here(job)
    if plan is None:
        out.print(f"{job.base.name}: no plan for a model of this kind; watch its memory", soft_wrap=True)
        return
    *lines, last = plan_lines(plan)
    if not plan.fits and not force:
        raise PiLoraError(f"{last}; or train all the same with --force")
    out.print(*lines, last, sep="\n", soft_wrap=True)
