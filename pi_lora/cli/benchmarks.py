"""`pi-lora eval benchmarks`."""

from typing import Annotated

import typer

from pi_lora.cli.app import (
    AllowChanged,
    Dtype,
    JsonFile,
    Models,
    Original,
    Scaling,
    Target,
    TrustRemoteCode,
    eval_app,
    stretch_of,
    working,
)
from pi_lora.cli.measuring import find_all, loaded, measured, report
from pi_lora.types import Allowed


@eval_app.command()
def benchmarks(
    models: Models,
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
    target: Target = None,
    scaling: Scaling = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_changed: AllowChanged = False,
    json: JsonFile = None,
) -> None:
    """Short-context benchmarks (paper, table 5) through lm-eval, of several models side by side."""
    stretch = stretch_of(original, target, scaling)
    with working("loading benchmarks"):
        from pi_lora.evaluation.benchmarks.table import benchmarks_table
        from pi_lora.evaluation.suite import MEASUREMENTS
        from pi_lora.recipe.schema import BenchmarksEvaluation

        found = find_all(models, stretch, Allowed(trust_remote_code, allow_changed))
        asked = BenchmarksEvaluation(
            tasks=tuple(tasks.split(",")), data=tuple(data or ()), limit=limit, batch_size=batch_size, window=window
        )
        measure = MEASUREMENTS["benchmarks"].prepare(asked)
    report(lambda: [measured("benchmarks", loaded(model, dtype), measure) for model in found], json, benchmarks_table)
