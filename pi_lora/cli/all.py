"""`pi-lora eval all`."""

from pathlib import Path
from typing import Annotated

import typer

from pi_lora.cli.app import AllowChanged, Dtype, TrustRemoteCode, eval_app, out, working
from pi_lora.cli.measuring import find_all, loaded, measure_into, say
from pi_lora.errors import ModelError
from pi_lora.types import Allowed


@eval_app.command("all")
def everything(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    again: Annotated[bool, typer.Option("--again", help="Measure also what has been.")] = False,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_changed: AllowChanged = False,
) -> None:
    """Measure what RUN's recipe names under `evaluation`, and keep it in RUN/scores."""
    with working("loading libraries"):
        from pi_lora.distributed import is_leader
        from pi_lora.evaluation.results import check_can_write, read_scores
        from pi_lora.evaluation.suite import MEASUREMENTS, asked_for, evaluation_of
        from pi_lora.run_folder import SCORES

        evaluation, named = evaluation_of(run)
        asked = asked_for(evaluation)
        files = {name: run / SCORES / f"{name}.json" for name in asked}
        missing = {
            name: MEASUREMENTS[name].prepare(section)
            for name, section in asked.items()
            if again or not files[name].is_file()
        }
        check_can_write(*(files[name] for name in missing))
        found = find_all([str(run)] if missing else [], None, Allowed(trust_remote_code, allow_changed))
    if not named:
        say(f"{run}: its recipe names no measurements; perplexity and passkey with their defaults")
    for each in found:
        measure_into(loaded(each, dtype), missing, files)
    for name, file in files.items() if is_leader() else ():
        if name not in missing:
            say(f"{file}: measured before; measure again with --again")
        kept = read_scores(file)
        if not isinstance(kept, MEASUREMENTS[name].kind):
            raise ModelError(f"{file}: holds no scores of {name}; measure again with --again")
        out.print(MEASUREMENTS[name].table(kept))
