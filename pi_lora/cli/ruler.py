"""`pi-lora eval ruler`."""

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
    Seed,
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
def ruler(
    models: Models,
    windows: Annotated[
        str | None,
        typer.Option(help="Lengths in tokens, as 4096,8192; by default L', halved down to L."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(metavar="NAME,...", help="Of lm-eval's 13; all by default.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=500, help="Prompts of each task and length.")] = 100,
    seed: Seed = 0,
    haystack: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text instead of the hub's essays, that needles lie in.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="TASK=FILE", help="A file instead of the web, for ruler_qa_*.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Prompts continued together; as many as 16,384 tokens hold.")
    ] = None,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Put prompts as chats.")] = False,
    original: Original = None,
    target: Target = None,
    scaling: Scaling = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_changed: AllowChanged = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw score against length, a PNG.")] = None,
    json: JsonFile = None,
) -> None:
    """RULER and the effective length (Hsieh et al. 2024) through lm-eval; several models side by side."""
    if plot:
        check_can_draw("--plot")
    lengths = lengths_in("--windows", windows) if windows else None
    stretch = stretch_of(original, target, scaling)
    with working("loading RULER"):
        from pi_lora.evaluation.suite import check_has_lm_eval

        check_has_lm_eval("ruler")
        from pi_lora.evaluation.ruler.effective import side_by_side
        from pi_lora.evaluation.ruler.measure import evaluate_ruler
        from pi_lora.evaluation.ruler.prompts import TASKS, find_texts
        from pi_lora.evaluation.ruler.table import ruler_picture, ruler_table
        from pi_lora.planning.evaluating import default_windows

        found = find_all(models, stretch, Allowed(trust_remote_code, allow_changed))
        asked = find_texts(tasks.split(",") if tasks else TASKS, haystack, data or ())
    original_windows = (round(model.window / model.scale) for model in found)
    lengths = lengths or default_windows(max(model.window for model in found), min(original_windows))
    for task, reason in asked.left_out.items():
        say(f"{task}: left out: {reason}")
    warn_of_length(found, "--windows", max(lengths))

    def measure(model: Any, progress: Any) -> Any:
        return evaluate_ruler(model, asked, lengths, samples, seed, batch_size, chat_template, progress)

    def scores() -> list[Any]:
        return side_by_side([measured("RULER", loaded(model, dtype), measure) for model in found])

    report(scores, json, ruler_table, picture=ruler_picture, plot=plot)
