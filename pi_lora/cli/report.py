"""`pi-lora report`."""

from pathlib import Path
from typing import Annotated

import typer

from pi_lora.cli.app import app, err, out, working


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN ...", help="Run folders that were measured.")],
    html: Annotated[bool, typer.Option("--html", help="Also one page that needs nothing beside it.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to; a run's own folder, or report/ for several.")
    ] = None,
) -> None:
    """How it went: the model card of a run with its pictures, or several runs side by side."""
    with working("writing the report"):
        from pi_lora.drawing import check_can_draw

        check_can_draw("report")
        from pi_lora.report.kept import missing_baselines, read_run
        from pi_lora.report.writing import write_report

        read = [read_run(run) for run in runs]
        files = write_report(read, output, html)
    for file in files:
        out.print(str(file), highlight=False, soft_wrap=True)
    if len(read) == 1 and (commands := list(missing_baselines(read[0]))):
        err.print("To show the base and step 0 beside it, measure them, then write the report again:", soft_wrap=True)
        for command in commands:
            err.print(f"  {command}", highlight=False, soft_wrap=True)
