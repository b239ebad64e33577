"""`pi-lora train` and `pi-lora prepare`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

from pi_lora.cli.app import EXTEND, LIBRARIES, app, out, progress_bar, read_recipe, working
from pi_lora.cli.options import GROUP, Override, RecipeFile, Trust, TrustRemoteCode
from pi_lora.distributed import is_launched, is_leader, launch, launch_arguments
from pi_lora.types import Permissions


@app.command(group=EXTEND, sort_key=1)
def train(
    recipe: RecipeFile,
    /,
    *overrides: Override,
    trust: Annotated[Trust, GROUP] = Trust(),
    output: Annotated[Path | None, Parameter(help="The run folder; adapters/<recipe> by default.")] = None,
    resume: Annotated[bool, Parameter(help="Continue an interrupted run, by its recipe or its folder.")] = False,
    dry_run: Annotated[bool, Parameter(help="Check recipe, model, data and output, then stop.")] = False,
    force: Annotated[bool, Parameter(help="Train even if the plan says that it does not fit.")] = False,
    print_launch: Annotated[bool, Parameter(help="Print the accelerate launch line instead of running it.")] = False,
    num_machines: Annotated[PositiveInt | None, Parameter(help="Machines, instead of hardware.machines.")] = None,
    machine_rank: Annotated[NonNegativeInt, Parameter(help="Number of this machine, from 0.")] = 0,
    main_process_ip: Annotated[str | None, Parameter(help="Address of machine 0.")] = None,
    main_process_port: Annotated[PositiveInt | None, Parameter(help="Port on machine 0.")] = None,
) -> None:
    """Tune a model to its target window by RECIPE."""
    from pi_lora.run import begun_or_new  # pydantic takes a while

    changes = [*overrides, *([f"hardware.machines={num_machines}"] if num_machines else [])]
    resolved, place = begun_or_new(recipe, changes, output, resume)
    permissions, launched = trust.permissions, is_launched()
    worker = ["train", str(recipe), *changes, *(["--output", str(output)] if output else []), *["--resume"] * resume]
    worker += ["--trust-remote-code"] * permissions.remote_code + ["--allow-changed"] * permissions.changed
    where = (machine_rank, main_process_ip, main_process_port)
    if print_launch:
        out.lines(shlex.join(["accelerate", "launch", *launch_arguments(resolved, worker, *where)]))
        return
    # Ctrl-C ends at once until all libraries are imported: some turn it into an error of their own.
    with working(LIBRARIES):
        from pi_lora.api import model_to_train

        model, lines = model_to_train(resolved, place, resume, force, permissions, ask_hub=dry_run)
        if dry_run:
            out.lines(*lines)
            return
        from pi_lora.training.training import closing_lines, prepare_data, train

    preparing = "preparing examples" if resolved.data.has_examples else "packing tokens"
    with progress_bar(preparing) as progress:
        data = prepare_data(resolved, model, progress)
    out.lines(*lines, *(f"data: {line}" for line in data.messages if not launched))
    if resolved.hardware.processes > 1 and not launched:
        if status := launch(launch_arguments(resolved, worker, *where)):
            sys.exit(status)
        return
    with progress_bar("training") as progress:
        folder = train(resolved, model, data, place, resume, progress)
    if is_leader():
        if resolved.tuning.method != "full" and model.needs_its_config:
            unscaled = "PEFT puts it on its plain base without the scaling, and only warns"
            out.lines(f"{folder}: load it with pi_lora.load, or merge it; {unscaled}")
        out.lines(*closing_lines(resolved, folder))


@app.command(group=EXTEND, sort_key=3)
def prepare(
    recipe: RecipeFile,
    /,
    *overrides: Override,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Tokenize and pack the training data of RECIPE into the cache; no GPU is needed."""
    with working(LIBRARIES):
        from pi_lora.preflight import check_data
        from pi_lora.recipe.places import cache_folder
        from pi_lora.training.training import prepare_data

        resolved = read_recipe(recipe, overrides).recipe
        model = check_data(resolved, Permissions(trust_remote_code))
    with progress_bar("preparing data") as progress:
        data = prepare_data(resolved, model, progress)
    done = f"{cache_folder()}: has the data of {recipe}; pi-lora train reads it from there"
    out.lines(*(f"data: {line}" for line in data.messages), done)
