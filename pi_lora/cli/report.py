"""`pi-lora report` and `push`: the card of a run, and its way to the hub."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pi_lora.cli.app import app, err, out, working


@app.command()
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN ...", help="Run folders that were measured.")],
    html: Annotated[bool, Option("--html", help="Also write one HTML page that needs no other file.")] = False,
    output: Annotated[Path | None, Option(help="Folder to write to; the run's own, or report/ for several.")] = None,
) -> None:
    """Write the model card of a run with its pictures, or compare several runs."""
    with working("writing the report"):
        from pi_lora.drawing import check_can_draw

        check_can_draw("report")
        from pi_lora.report.pages import write_report
        from pi_lora.report.run import measured_run, missing_baselines

        read = [measured_run(run) for run in runs]
        files = write_report(read, output, html)
    out.lines(*files)
    if len(read) == 1 and (commands := list(missing_baselines(read[0]))):
        what = "To compare with the base and step 0, measure them and write the report again:"
        err.lines(what, *(f"  {command}" for command in commands))


@app.command()
def push(
    model: Annotated[Path, Argument(metavar="RUN|MODEL", help="A run folder, or a folder of full weights.")],
    repo: Annotated[str, Argument(metavar="REPO", help="As you/name; created if it does not exist.")],
    private: Annotated[bool, Option(help="Create a private repository.")] = False,
    revision: Annotated[str | None, Option(metavar="BRANCH", help="Created if it does not exist.")] = None,
    message: Annotated[str | None, Option(help="The commit message.")] = None,
) -> None:
    """Upload a run or a merged model to the Hugging Face hub, with its card but without checkpoints."""
    with working(f"uploading {model}"):
        from pi_lora.report.upload import push

        url = push(model, repo, private, revision, message)
    out.lines(url)
