"""`pi-lora eval perplexity`."""

from pathlib import Path
from typing import Annotated, Any

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
    lengths_in,
    stretch_of,
    working,
)
from pi_lora.cli.measuring import find_all, loaded, measured, report, say, warn_of_length
from pi_lora.drawing import check_can_draw
from pi_lora.types import Allowed


@eval_app.command()
def perplexity(
    models: Models,
    data: Annotated[
        str, typer.Option(metavar="SOURCE", help="A file, folder, glob or hub id; builtin:stdlib; pg19 or proof-pile.")
    ] = "builtin:stdlib",
    windows: Annotated[str | None, typer.Option(help="Lengths in tokens, as 2048,4096.")] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens a window moves; 256, or half the shortest.")] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="The first N, or N drawn by --seed.")] = None,
    truncate: Annotated[int | None, typer.Option(min=2, help="Cut documents to their first N tokens.")] = None,
    min_tokens: Annotated[int | None, typer.Option(min=1, help="Leave out documents of fewer.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Draw documents at random.")] = None,
    split: Annotated[str, typer.Option(help="Of a hub data set.")] = "test",
    column: Annotated[str, typer.Option(help="Of rows: the one that holds the text.")] = "text",
    by_position: Annotated[bool, typer.Option("--by-position", help="Also the loss by position in a window.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw that as a PNG.")] = None,
    original: Original = None,
    target: Target = None,
    scaling: Scaling = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_changed: AllowChanged = False,
    json: JsonFile = None,
) -> None:
    """Sliding-window perplexity (paper, section 3.2), of several models side by side."""
    if plot:
        check_can_draw("--plot")
    lengths = lengths_in("--windows", windows) if windows else None
    stretch = stretch_of(original, target, scaling)
    with working("loading libraries"):
        from pi_lora.data.sources import Choice
        from pi_lora.evaluation.perplexity.measure import evaluate_perplexity
        from pi_lora.evaluation.perplexity.table import perplexity_table, position_picture, position_table
        from pi_lora.planning.evaluating import default_windows

        found = find_all(models, stretch, Allowed(trust_remote_code, allow_changed))
    # All are measured alike.
    lengths = lengths or default_windows(max(model.window for model in found), stride)
    choice = Choice(documents, min_tokens, truncate, seed, split, column)
    by_position = by_position or plot is not None

    def measure(model: Any, progress: Any) -> Any:
        return evaluate_perplexity(model, data, lengths, stride, choice, progress, by_position=by_position, shared=True)

    tables = (perplexity_table, position_table) if by_position else (perplexity_table,)

    def scores() -> list[Any]:
        all_scores = [measured("perplexity", loaded(model, dtype), measure) for model in found]
        warn_of_length(found, "--windows", max(lengths))
        if documents is None and (taken := choice.of(data).documents):
            say(f"{data}: {taken} documents, unless --documents says otherwise")
        return all_scores

    report(scores, json, *tables, picture=position_picture, plot=plot)
