"""`pi-lora eval passkey`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pi_lora.cli.app import (
    MOST_TOKENS,
    AllowChanged,
    Dtype,
    JsonFile,
    Models,
    Original,
    Scaling,
    Seed,
    TrustRemoteCode,
    eval_app,
    lengths_in,
    stretch_of,
    working,
)
from pi_lora.cli.measuring import find_all, loaded, measured, report, warn_of_length
from pi_lora.drawing import check_can_draw
from pi_lora.errors import PiLoraError
from pi_lora.types import Allowed

# Of depths, and of trials at each.
MOST = 10_000


@eval_app.command()
def passkey(
    models: Models,
    target: Annotated[
        int | None, typer.Option(min=1, max=MOST_TOKENS, help="L', tokens of context; the longest window by default.")
    ] = None,
    targets: Annotated[
        str | None, typer.Option(metavar="L',...", help="Several lengths, as 1024,2048: depth against length.")
    ] = None,
    depths: Annotated[int, typer.Option(min=1, max=MOST, help="Distances, uniformly spaced to the target.")] = 32,
    trials: Annotated[int, typer.Option(min=1, max=MOST, help="Random keys at each.")] = 10,
    seed: Seed = 0,
    k_max_only: Annotated[bool, typer.Option("--k-max-only", help="Measure no more than decides k_max.")] = False,
    original: Original = None,
    scaling: Scaling = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_changed: AllowChanged = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw heat map and curve, a PNG.")] = None,
    json: JsonFile = None,
) -> None:
    """Passkey retrieval and k_max (paper, section 3.3); several models side by side."""
    if plot:
        check_can_draw("--plot")
    lengths = lengths_in("--targets", targets) if targets else []
    if lengths and (target or k_max_only):
        raise PiLoraError("--targets: measures every depth of each length; leave out --target and --k-max-only")
    stretched = original is not None or scaling is not None
    stretch = stretch_of(original, (target or max(lengths, default=None)) if stretched else None, scaling)
    with working("loading libraries"):
        from pi_lora.evaluation.passkey import table
        from pi_lora.evaluation.passkey.measure import evaluate_passkey, evaluate_passkey_map
        from pi_lora.evaluation.passkey.prompt import Grid

        found = find_all(models, stretch, Allowed(trust_remote_code, allow_changed))
    lengths = lengths or [target or max(model.window for model in found)]
    grids = [Grid(length, depths, trials, seed) for length in lengths]
    warn_of_length(found, "--targets" if targets else "--target", lengths[-1])

    def measure(model: Any, progress: Any) -> Any:
        if targets:
            return evaluate_passkey_map(model, grids, progress, shared=True)
        return evaluate_passkey(model, grids[0], progress, k_max_only=k_max_only, shared=True)

    def scores() -> list[Any]:
        return [measured("passkey", loaded(model, dtype), measure) for model in found]

    shown = (
        (table.passkey_map_table, table.passkey_map_picture)
        if targets
        else (table.passkey_table, table.passkey_picture)
    )
    report(scores, json, shown[0], picture=shown[1], plot=plot)
