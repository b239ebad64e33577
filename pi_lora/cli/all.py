"""`pi-lora eval all`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pi_lora.cli.app import Dtype, err, eval_app, out, progress_bar, working


@eval_app.command("all")
def everything(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    again: Annotated[bool, typer.Option("--again", help="Measure also what has been.")] = False,
    dtype: Dtype = None,
) -> None:
    """Measure what RUN's recipe names under `evaluation`, and keep it in RUN/scores."""
    with working("loading libraries"):
        from pi_lora.distributed import is_launched, is_leader, join_processes
        from pi_lora.evaluation.results import write_scores
        from pi_lora.evaluation.suite import evaluation_of, measurements, names_in
        from pi_lora.models.base import device
        from pi_lora.models.load import load
        from pi_lora.run_folder import SCORES

        evaluation, named = evaluation_of(run)
        files = {name: run / SCORES / f"{name}.json" for name in names_in(evaluation)}
        missing = [name for name, file in files.items() if again or not file.is_file()]
        to_measure = measurements(evaluation, missing)
        if is_launched():
            join_processes(cpu=device().type == "cpu")
    if not named and is_leader():
        _say(f"{run}: its recipe names no measurements; perplexity and passkey with their defaults")
    if to_measure:
        with working(f"loading {run}"):
            loaded = load(str(run), dtype=dtype)
    for name, measure in to_measure.items():
        with progress_bar(f"{name} {run}", quiet=not is_leader()) as progress:
            scores = measure(loaded, progress)
        if is_leader():
            write_scores(scores, files[name])
    if not is_leader():
        return
    for name, file in files.items():
        if name not in to_measure:
            _say(f"{file}: measured before; measure again with --again")
        out.print(_table(name, json.loads(file.read_text(encoding="utf-8"))))


def _table(name: str, scores: dict[str, Any]) -> Any:
    from pi_lora.evaluation.benchmarks.table import benchmarks_table
    from pi_lora.evaluation.passkey.table import passkey_table
    from pi_lora.evaluation.perplexity.table import perplexity_table

    return {"perplexity": perplexity_table, "passkey": passkey_table, "benchmarks": benchmarks_table}[name](scores)


def _say(message: str) -> None:
    err.print(message, highlight=False, soft_wrap=True)
