"""`pi-lora eval benchmarks`."""

from typing import Annotated

import typer

from pi_lora.cli.app import Dtype, JsonFile, Original, Scaling, eval_app, out, progress_bar, stretch_of, working


@eval_app.command()
def benchmarks(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL ...", help="Hub ids, model or run folders, or builtin:tiny.")
    ],
    tasks: Annotated[
        str | None, typer.Option(help="Of boolq,piqa,race_middle,race_high,winogrande; all by default.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK=FILE", help="A task's own file or folder instead of the hub, or a folder of such."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N examples of each.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Inputs a forward pass.")] = 8,
    window: Annotated[int | None, typer.Option(min=2, help="Tokens that inputs are cut to; L by default.")] = None,
    original: Original = None,
    target: Annotated[int | None, typer.Option(help="L', the window to stretch to.")] = None,
    scaling: Scaling = None,
    dtype: Dtype = None,
    json: JsonFile = None,
) -> None:
    """Short-context benchmarks (paper, table 5) through lm-eval, of several models side by side."""
    stretch = stretch_of(original, target, scaling)
    with working("loading benchmarks"):
        from pi_lora.distributed import is_launched, is_leader, join_processes
        from pi_lora.evaluation.benchmarks.measure import TASKS, evaluate_benchmarks, prepare
        from pi_lora.evaluation.benchmarks.table import benchmarks_table
        from pi_lora.evaluation.results import write_scores
        from pi_lora.models.base import device
        from pi_lora.models.load import find, load

        for model in models:
            find(model, stretch)  # Refuses what cannot be loaded before any of them is measured.
        prepared = prepare(tasks.split(",") if tasks else TASKS, data or [])
        if is_launched():
            join_processes(cpu=device().type == "cpu")
    scores = []
    for model in models:
        with working(f"loading {model}"):
            loaded = load(model, stretch, dtype)
        with progress_bar(f"benchmarks {model}", quiet=not is_leader()) as progress:
            scores.append(evaluate_benchmarks(loaded, prepared, limit, batch_size, window, progress))
    if not is_leader():
        return
    out.print(benchmarks_table(*scores))
    if json:
        write_scores(scores if len(scores) > 1 else scores[0], json)
