"""`pi-lora eval passkey`."""

from typing import Annotated

import typer

from pi_lora.cli.app import (
    Dtype,
    JsonFile,
    ModelName,
    Original,
    Scaling,
    eval_app,
    out,
    progress_bar,
    stretch_of,
    working,
)


@eval_app.command()
def passkey(
    model: ModelName,
    target: Annotated[int | None, typer.Option(help="L', tokens of context; the model's window by default.")] = None,
    depths: Annotated[int, typer.Option(min=1, help="Distances, uniformly spaced to the target.")] = 32,
    trials: Annotated[int, typer.Option(min=1, help="Random keys at each.")] = 10,
    seed: int = 0,
    original: Original = None,
    scaling: Scaling = None,
    dtype: Dtype = None,
    json: JsonFile = None,
) -> None:
    """Passkey retrieval and k_max (paper, section 3.3)."""
    with working(f"loading {model}"):
        from pi_lora.evaluate.passkey import evaluate_passkey
        from pi_lora.evaluate.scores import write_scores
        from pi_lora.report.tables import passkey_table
        from pi_lora.run import load

        stretched = original is not None or scaling is not None
        loaded = load(model, stretch_of(original, target if stretched else None, scaling), dtype)
    with progress_bar("passkey") as progress:
        scores = evaluate_passkey(loaded, target or loaded.window, depths, trials, seed, progress)
    out.print(passkey_table(scores))
    if json:
        write_scores(scores, json)
