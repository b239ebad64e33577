"""`pi-lora eval perplexity`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from pi_lora.cli.app import (
    Dtype,
    JsonFile,
    Original,
    Scaling,
    err,
    eval_app,
    lengths_in,
    out,
    progress_bar,
    stretch_of,
    working,
)
from pi_lora.errors import PiLoraError


@eval_app.command()
def perplexity(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL ...", help="Hub ids, model or run folders, or builtin:tiny.")
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="SOURCE", help="A file, folder, glob or hub id; builtin:stdlib; pg19 or proof-pile, as the paper."
        ),
    ] = "builtin:stdlib",
    windows: Annotated[str | None, typer.Option(help="Lengths in tokens, as 2048,4096.")] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens a window moves; 256, or half the shortest.")] = None,
    documents: Annotated[
        int | None, typer.Option(min=1, help="Measure only the first N, or N drawn by --seed.")
    ] = None,
    truncate: Annotated[int | None, typer.Option(min=2, help="Cut documents to their first N tokens.")] = None,
    min_tokens: Annotated[int | None, typer.Option(min=1, help="Leave out documents of fewer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Draw documents at random.")] = None,
    split: Annotated[str, typer.Option(help="Of a hub data set.")] = "test",
    column: Annotated[str, typer.Option(help="Of rows: the one that holds the text.")] = "text",
    by_position: Annotated[bool, typer.Option("--by-position", help="Also the loss by position in a window.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw that as a PNG.")] = None,
    original: Original = None,
    target: Annotated[int | None, typer.Option(help="L', the window to stretch to.")] = None,
    scaling: Scaling = None,
    dtype: Dtype = None,
    json: JsonFile = None,
) -> None:
    """Sliding-window perplexity (paper, section 3.2), of several models side by side."""
    if plot and find_spec("matplotlib") is None:
        raise PiLoraError("--plot: needs matplotlib; pip install 'pi-lora[plots]'")
    lengths = lengths_in(windows) if windows else None
    stretch = stretch_of(original, target, scaling)
    with working("loading libraries"):
        from pi_lora.data.corpus import Choice
        from pi_lora.distributed import is_launched, is_leader, join_processes
        from pi_lora.evaluation.perplexity.measure import default_stride, default_windows
        from pi_lora.models.base import device
        from pi_lora.models.load import find

        if is_launched():
            join_processes(cpu=device().type == "cpu")
        # All are looked at before any is measured, and all are measured alike.
        longest = max([find(model, stretch).window for model in models])
    lengths = lengths or default_windows(longest)
    step = stride or default_stride(lengths)
    choice = Choice(documents, min_tokens, truncate, seed, split, column)
    by_position = by_position or plot is not None
    measured = [_measured(model, stretch, dtype, data, choice, lengths, step, by_position) for model in models]
    if is_leader():
        _show(measured, json, plot)


def _measured(
    name: str,
    stretch: Any,
    dtype: str | None,
    data: str,
    choice: Any,
    windows: list[int],
    stride: int,
    by_position: bool,
) -> dict[str, Any]:
    from pi_lora.distributed import is_leader
    from pi_lora.evaluation.perplexity.measure import evaluate_perplexity
    from pi_lora.models.load import load

    def warn(line: str) -> None:
        if is_leader():
            err.print(line, highlight=False, soft_wrap=True)

    with working(f"loading {name}"):
        loaded = load(name, stretch, dtype)
    with progress_bar("perplexity", quiet=not is_leader()) as progress:
        how = {"choice": choice, "by_position": by_position, "shared": True, "warn": warn}
        return evaluate_perplexity(loaded, data, windows, stride, None, progress, **how)


def _show(measured: list[dict[str, Any]], json: Path | None, plot: Path | None) -> None:
    from pi_lora.evaluation.perplexity.table import perplexity_table, position_picture, position_table
    from pi_lora.evaluation.results import write_scores

    if json:
        result: Any = measured if len(measured) > 1 else measured[0]
        write_scores(result, json)
    out.print(perplexity_table(*measured))
    if "by_position" in measured[0]:
        out.print(position_table(*measured))
    if plot:
        position_picture(measured, plot)
