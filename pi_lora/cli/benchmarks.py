"""`pi-lora eval benchmarks`."""

from typing import Annotated, Any

import typer

from pi_lora.cli.app import Dtype, JsonFile, Original, Scaling, eval_app, out, stretch_of, working
from pi_lora.cli.measuring import find_all, loaded, measured


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
        from pi_lora.distributed import is_leader
        from pi_lora.evaluation.benchmarks.measure import evaluate_benchmarks, prepare
        from pi_lora.evaluation.benchmarks.table import benchmarks_table
        from pi_lora.evaluation.results import write_scores

        found = find_all(models, stretch)
        prepared = prepare(tasks.split(","), data or [])

    def measure(model: Any, progress: Any) -> Any:
        return evaluate_benchmarks(model, prepared, limit, batch_size, window, progress)

    scores = [measured("benchmarks", loaded(model, dtype), measure) for model in found]
    if is_leader():
        out.print(benchmarks_table(*scores))
        if json:
            write_scores(scores, json)
