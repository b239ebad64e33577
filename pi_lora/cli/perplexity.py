"""`pi-lora eval perplexity`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pi_lora.cli.app import Dtype, JsonFile, Original, Scaling, eval_app, lengths_in, out, stretch_of, working
from pi_lora.cli.measuring import find_all, loaded, measured, warn_of_length
from pi_lora.drawing import check_can_draw


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
    if plot:
        check_can_draw("--plot")
    lengths = lengths_in(windows) if windows else None
    stretch = stretch_of(original, target, scaling)
    with working("loading libraries"):
        from pi_lora.data.corpus import Choice
        from pi_lora.distributed import is_leader
        from pi_lora.evaluation.perplexity.measure import default_stride, default_windows, evaluate_perplexity
        from pi_lora.evaluation.perplexity.table import perplexity_table, position_picture, position_table
        from pi_lora.evaluation.results import write_scores

        found = find_all(models, stretch)
    # All are measured alike.
    lengths = lengths or default_windows(max(model.window for model in found))
    step = stride or default_stride(lengths)
    choice = Choice(documents, min_tokens, truncate, seed, split, column)
    by_position = by_position or plot is not None
    warn_of_length(found, "--windows", max(lengths))

    def measure(model: Any, progress: Any) -> Any:
        return evaluate_perplexity(
            model, data, lengths, step, progress=progress, choice=choice, by_position=by_position, shared=True
        )

    scores = [measured("perplexity", loaded(model, dtype), measure) for model in found]
    if not is_leader():
        return
    if json:
        write_scores(scores, json)
    out.print(perplexity_table(*scores))
    if by_position:
        out.print(position_table(*scores))
    if plot:
        position_picture(scores, plot)
