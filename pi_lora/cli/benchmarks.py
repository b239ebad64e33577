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
        str, typer.Option(metavar="NAME,...", help="Tasks or groups of lm-eval.")
    ] = "boolq,piqa,race_middle,race_high,winogrande",
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
        from pi_lora.evaluation.benchmarks.measure import evaluate_benchmarks, prepare
        from pi_lora.evaluation.benchmarks.table import benchmarks_table
        from pi_lora.evaluation.results import write_scores
        from pi_lora.models.base import device
        from pi_lora.models.load import find

        # What cannot be loaded is refused before any model is measured.
        found = [find(model, stretch) for model in models]
        prepared = prepare(tasks.split(","), data or [])
        if is_launched():
            join_processes(cpu=device().type == "cpu")
    scores = []
    for model in found:
        with working(f"loading {model.name}"):
            loaded = model.load(dtype)
        with progress_bar(f"benchmarks {model.name}", quiet=not is_leader()) as progress:
            scores.append(evaluate_benchmarks(loaded, prepared, limit, batch_size, window, progress))
    if is_leader():
        out.print(benchmarks_table(*scores))
        if json:
            write_scores(scores, json)
