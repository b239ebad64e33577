"""`pi-lora eval passkey`."""

from pathlib import Path
from typing import Annotated

import typer

from pi_lora.cli.app import Dtype, JsonFile, Original, Scaling, err, eval_app, out, progress_bar, stretch_of, working


@eval_app.command()
def passkey(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL ...", help="Hub ids, model folders, run folders or builtin:tiny.")
    ],
    target: Annotated[int | None, typer.Option(help="L', tokens of context; the longest window by default.")] = None,
    depths: Annotated[int, typer.Option(min=1, help="Distances, uniformly spaced to the target.")] = 32,
    trials: Annotated[int, typer.Option(min=1, help="Random keys at each.")] = 10,
    seed: int = 0,
    k_max_only: Annotated[bool, typer.Option("--k-max-only", help="Measure no more than decides k_max.")] = False,
    original: Original = None,
    scaling: Scaling = None,
    dtype: Dtype = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw heat map and curve, a PNG.")] = None,
    json: JsonFile = None,
) -> None:
    """Passkey retrieval and k_max (paper, section 3.3); several models side by side."""
    with working("loading libraries"):
        from pi_lora.distributed import is_leader, join_processes, number_of_processes
        from pi_lora.drawing import check_can_draw
        from pi_lora.evaluation.passkey.measure import evaluate_passkey
        from pi_lora.evaluation.passkey.table import passkey_picture, passkey_table
        from pi_lora.evaluation.results import write_scores
        from pi_lora.models.base import device
        from pi_lora.models.load import find, load

    if plot:
        check_can_draw("--plot")
    stretched = original is not None or scaling is not None
    stretch = stretch_of(original, target if stretched else None, scaling)
    windows = [find(model, stretch).window for model in models]
    length = target or max(windows)
    if number_of_processes() > 1:
        join_processes(cpu=device().type == "cpu")
    scores = []
    for model, window in zip(models, windows, strict=True):
        if length > window and is_leader():
            err.print(
                f"--target: {length} tokens are more than the {window} that {model} covers; measured all the same",
                highlight=False,
                soft_wrap=True,
            )
        with working(f"loading {model}"):
            loaded = load(model, stretch, dtype)
        with progress_bar(f"passkey {model}", quiet=not is_leader()) as progress:
            scores.append(
                evaluate_passkey(loaded, length, depths, trials, seed, progress, k_max_only=k_max_only, shared=True)
            )
    if not is_leader():
        return
    out.print(passkey_table(*scores))
    if plot:
        passkey_picture(scores, plot)
    if json:
        write_scores(scores if len(scores) > 1 else scores[0], json)
