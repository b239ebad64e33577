"""`pi-lora compare`, `report` and `push`: a run beside its base, its card, and its way to the hub."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from pi_lora.cli.app import LIBRARIES, app, err, out, say, working
from pi_lora.cli.evaluate import display
from pi_lora.cli.options import GROUP, Again, JsonFile, Loading
from pi_lora.distributed import is_leader


@app.command
def compare(
    base: Annotated[str, Parameter(name="BASE", help="Hub id, folder or builtin:tiny.")],
    run: Annotated[Path, Parameter(name="RUN", help="A run folder, tuned from BASE.")],
    /,
    *,
    how: Annotated[Loading, GROUP] = Loading(),
    short: Annotated[list[str] | None, Parameter(help="Also benchmarks: TASK, or TASK=FILE.")] = None,
    ruler: Annotated[PositiveInt | None, Parameter(help="Also RULER, with so many prompts of each task.")] = None,
    again: Again = False,
    json: JsonFile = None,
) -> None:
    """What the stretch gained and cost: BASE and RUN side by side, with intervals and verdicts.

    Perplexity, passkeys and what the run's recipe names: read from RUN/scores, or measured and kept there.
    """
    with working(LIBRARIES):
        from pi_lora.evaluation.registry import MEASUREMENTS
        from pi_lora.evaluation.suite import asked_for, evaluation_of, measure_into, prepared
        from pi_lora.recipe.evaluation import BenchmarksOptions, PasskeyOptions, PerplexityOptions, RulerOptions
        from pi_lora.report.comparison import compare as rows_of
        from pi_lora.report.comparison import verdict_table
        from pi_lora.report.run import MeasuredRun
        from pi_lora.run import BASE
        from pi_lora.writing import check_can_write, write_json

        asked: dict[str, Any] = {"perplexity": PerplexityOptions(), "passkey": PasskeyOptions()}
        asked |= asked_for(evaluation_of(run)[0])
        if short:
            data = tuple(each for each in short if "=" in each)
            asked["benchmarks"] = BenchmarksOptions(tasks=tuple(each.partition("=")[0] for each in short), data=data)
        if ruler:
            asked["ruler"] = RulerOptions(samples=ruler)
        folder = MeasuredRun(run)
        own = {} if again else folder.own_scores
        names = [name for name in MEASUREMENTS if name in asked or name in own]
        files = {name: folder.scores_file(name) for name in names if name not in own}
        check_can_write(json, *files.values())
        kept = {} if again else folder.base_scores(base, own)
        found = how.find(*[str(run)] if files else [], *[base] if set(names) > set(kept) else [])
        missing = prepared({name: asked[name] for name in files}, found[:1])
    if missing:
        own |= measure_into(found[0], missing, files, dtype=how.dtype, display=display())
        kept = {} if again else folder.base_scores(base, own)
    files = {name: folder.scores_file(name, BASE) for name in names if name not in kept}
    free = {name: file for name, file in files.items() if again or not file.exists()}
    for name in files.keys() - free.keys():
        say(f"{files[name]}: is of another model, or measured otherwise; {base} is measured, and not kept")
    if files:
        alike = {name: own[name].options for name in files}
        kept |= measure_into(found[-1], alike, free, dtype=how.dtype, display=display())
    if is_leader():
        rows = [row for name in names for row in rows_of(kept[name], own[name], folder.original)]
        if json:
            content = {"base": base, "run": str(run), "original": folder.original}
            write_json(json, {**content, "rows": [row.model_dump(exclude_unset=True) for row in rows]})
        out.print(verdict_table(base, str(run), rows))


@app.command
def report(
    runs: Annotated[list[Path], Parameter(name="RUN", help="Run folders that were measured.")],
    /,
    *,
    html: Annotated[bool, Parameter(help="Also write one HTML page that needs no other file.")] = False,
    output: Annotated[Path | None, Parameter(help="Folder to write to; the run's own, or report/ for several.")] = None,
) -> None:
    """Write the model card of a run with its pictures, or compare several runs."""
    with working("writing the report"):
        from pi_lora.report.pages import write_report
        from pi_lora.report.run import measured_run, missing_baselines

        read = [measured_run(run) for run in runs]
        files = write_report(read, output, html)
    out.lines(*files)
    if len(read) == 1 and (commands := list(missing_baselines(read[0]))):
        what = "To compare with the base and step 0, measure them and write the report again:"
        err.lines(what, *(f"  {command}" for command in commands))


@app.command
def push(
    model: Annotated[Path, Parameter(name="RUN|MODEL", help="A run folder, or a folder of full weights.")],
    repo: Annotated[str, Parameter(name="REPO", help="As you/name; created if it does not exist.")],
    /,
    *,
    private: Annotated[bool, Parameter(help="Create a private repository.")] = False,
    revision: Annotated[str | None, Parameter(help="A branch, created if it does not exist.")] = None,
    message: Annotated[str | None, Parameter(help="The commit message.")] = None,
) -> None:
    """Upload a run or a merged model to the Hugging Face hub, with its card but without checkpoints."""
    with working(f"uploading {model}"):
        from pi_lora.report.upload import push

        url = push(model, repo, private, revision, message)
    out.lines(url)
