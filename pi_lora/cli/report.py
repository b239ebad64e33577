"""`pi-lora compare`, `report` and `push`: a run beside its base, its card, and its way to the hub."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from pi_lora.cli.app import LIBRARIES, MEASURE, app, out, working
from pi_lora.cli.evaluate import display
from pi_lora.cli.options import GROUP, Again, JsonFile, Loading, ModelName, OtherText
from pi_lora.distributed import is_leader
from pi_lora.recipe.evaluation import ProbeOptions
from pi_lora.writing import check_can_write, write_json


@app.command(group=MEASURE, sort_key=2)
def compare(
    base: Annotated[str, Parameter(name="BASE", help="Hub id, folder or builtin:tiny.")],
    run: Annotated[str, Parameter(name="RUN", help="A run, a folder or hub id, tuned from BASE.")],
    /,
    *,
    how: Annotated[Loading, GROUP] = Loading(),
    data: OtherText = None,
    another: Annotated[bool, Parameter(help="BASE is another model than the one that RUN was tuned from.")] = False,
    short: Annotated[list[str] | None, Parameter(help="Also benchmarks: TASK or TASK=FILE.")] = None,
    ruler: Annotated[PositiveInt | None, Parameter(help="Also RULER, with this number of prompts per task.")] = None,
    chat: Annotated[str | None, Parameter(help="Also the assistant's turns of these chats.")] = None,
    again: Again = False,
    json: JsonFile = None,
) -> None:
    """Compare a run with its base: what the extension gained and cost, with 95 % intervals.

    Scores are read from RUN/scores; those that RUN's recipe names and that are missing are measured and kept there.
    """
    with working(LIBRARIES):
        from pi_lora.recipe.evaluation import BenchmarksOptions, ChatOptions, RulerOptions
        from pi_lora.report.comparison import compare_run, comparison_table

    asked: dict[str, Any] = {}
    if short:
        files = tuple(task for task in short if "=" in task)
        tasks = tuple(task.partition("=")[0] for task in short)
        asked["benchmarks"] = BenchmarksOptions(tasks=tasks, data=files)
    if ruler:
        asked["ruler"] = RulerOptions(samples=ruler)
    if chat:
        asked["chat"] = ChatOptions(data=chat, base=base)
    allowed: dict[str, Any] = {"data": data, "another": another, "again": again, "dtype": how.dtype}
    check_can_write(json)
    comparison = compare_run(base, run, how.find, asked, **allowed, display=display())
    if is_leader():
        out.print(comparison_table(comparison))
    if json and is_leader():
        write_json(json, comparison.model_dump())


@app.command(group=MEASURE, sort_key=6)
def probe(
    model: ModelName,
    /,
    *,
    options: Annotated[ProbeOptions, GROUP],
    how: Annotated[Loading, GROUP] = Loading(),
    json: JsonFile = None,
) -> None:
    """Measure before any tuning which scaling suits MODEL: perplexity and passkeys, inside its window and at --target.

    The last line names the best, and whether tuning is needed at all.
    """
    with working(LIBRARIES):
        from pi_lora.report.probe import next_command, probe, probe_table

        [base] = how.find(model)
    found = probe(base, options, json=json, dtype=how.dtype, display=display())
    for reach in found.targets if is_leader() else ():
        out.print(probe_table(found, reach))
        need = "no tuning is needed" if reach.enough else "tuning can add to it"
        out.lines(f"{reach.summary}; {need}: {next_command(found, reach, json)}")


@app.command(group=MEASURE, sort_key=3)
def report(
    run: Annotated[Path, Parameter(name="RUN", help="A run folder that was measured.")],
    /,
    *,
    html: Annotated[bool, Parameter(help="Also write one HTML page that needs no other file.")] = False,
    output: Annotated[Path | None, Parameter(help="Folder to write to; by default RUN itself.")] = None,
) -> None:
    """Write the model card of a run, with pictures of its scores and its loss."""
    with working("writing the report"):
        from pi_lora.report.card import write_report

        files = write_report(run, output, html)
    out.lines(*files)


@app.command(group=MEASURE, sort_key=6)
def push(
    model: Annotated[Path, Parameter(name="RUN|MODEL", help="A run folder, or a folder of full weights.")],
    repo: Annotated[str, Parameter(name="REPO", help="As you/name; created if it does not exist.")],
    /,
    *,
    private: Annotated[bool, Parameter(help="Create a private repository.")] = False,
) -> None:
    """Upload a run or a merged model to the Hugging Face hub, with its card but without checkpoints."""
    with working(f"uploading {model}"):
        from pi_lora.report.upload import push

        url = push(model, repo, private)
    out.lines(url)
