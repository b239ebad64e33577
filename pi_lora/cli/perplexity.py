"""`pi-lora eval perplexity`."""

from typing import Annotated

import typer

from pi_lora.cli.app import (
    Dtype,
    JsonFile,
    ModelName,
    Original,
    Scaling,
    eval_app,
    lengths_in,
    out,
    progress_bar,
    stretch_of,
    working,
)


@eval_app.command()
def perplexity(
    model: ModelName,
    data: Annotated[
        str, typer.Option(metavar="SOURCE", help="A text file, a folder, or builtin:stdlib.")
    ] = "builtin:stdlib",
    windows: Annotated[str | None, typer.Option(help="Lengths in tokens, as 2048,4096.")] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens a window moves; 256, or half the shortest.")] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Measure only the first N.")] = None,
    original: Original = None,
    target: Annotated[int | None, typer.Option(help="L', the window to stretch to.")] = None,
    scaling: Scaling = None,
    dtype: Dtype = None,
    json: JsonFile = None,
) -> None:
    """Sliding-window perplexity (paper, section 3.2)."""
    lengths = lengths_in(windows) if windows else None
    with working(f"loading {model}"):
        from pi_lora.evaluate.perplexity import default_stride, default_windows, evaluate_perplexity
        from pi_lora.evaluate.scores import write_scores
        from pi_lora.report.tables import perplexity_table
        from pi_lora.run import load

        loaded = load(model, stretch_of(original, target, scaling), dtype)
    with progress_bar("perplexity") as progress:
        lengths = lengths or default_windows(loaded.window)
        scores = evaluate_perplexity(loaded, data, lengths, stride or default_stride(lengths), documents, progress)
    out.print(perplexity_table(scores))
    if json:
        write_scores(scores, json)
