"""`pi-lora theory`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pi_lora.cli.app import JsonFile, app, out, progress_bar, working
from pi_lora.errors import PiLoraError


@app.command()
def theory(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Take d, c, L and L' from it: hub id, folder, run, builtin:tiny."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also measure the scores of MODEL's queries and keys on it.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(help="d; 128 as LLaMA-7B.")] = None,
    theta: Annotated[float | None, typer.Option(help="c; 10000 as LLaMA.")] = None,
    original: Annotated[int | None, typer.Option(help="L in tokens; the model's, or 2048.")] = None,
    target: Annotated[int | None, typer.Option(help="L' in tokens; the model's, or twice L.")] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the figures go.")] = Path("theory"),
    json: JsonFile = None,
) -> None:
    """Why it works: the bounds and figures of the paper (section 2), for any setting and on a real model."""
    from pi_lora.drawing import check_can_draw

    check_can_draw("theory")
    _check_options(model, text, head_dim, theta)
    with working("computing the bounds"):
        from pi_lora.theory.bounds import bounds_of
        from pi_lora.theory.figures import bounds_table, draw_theory

        setting = _setting(model, head_dim, theta, original, target)
        bounds = bounds_of(setting)
    out.print(bounds_table(setting, bounds))
    result = {"setting": asdict(setting), "bounds": asdict(bounds)}
    with working("drawing"):
        files = draw_theory(setting, output)
    if model and text:
        found, measured = _measured(model, text, setting, output)
        result["measured"] = found
        files += measured
    for file in files:
        out.print(str(file), highlight=False, soft_wrap=True)
    if json:
        from pi_lora.evaluation.results import write_json

        write_json(result, json)


def _check_options(model: str | None, text: Path | None, head_dim: int | None, theta: float | None) -> None:
    if text and not model:
        raise PiLoraError("--text: is what a model reads; name one with --model")
    if model and (head_dim is not None or theta is not None):
        raise PiLoraError("--head-dim, --theta: come with --model; leave them out")


def _setting(
    model: str | None, head_dim: int | None, theta: float | None, original: int | None, target: int | None
) -> Any:
    from pi_lora.theory.bounds import Setting, setting_of

    if model is None:
        window = original or Setting.original
        return Setting(head_dim or Setting.head_dim, theta or Setting.theta, window, target or 2 * window)
    from pi_lora.models.load import find

    return setting_of(find(model).config, original, target)


def _measured(model: str, text: Path, setting: Any, output: Path) -> tuple[dict[str, Any], list[Path]]:
    from pi_lora.models.load import load
    from pi_lora.theory.figures import attention_table, draw_attention
    from pi_lora.theory.watching import measure_attention

    with working(f"loading {model}"):
        loaded = load(model)
    with progress_bar("layers") as progress:
        found = measure_attention(loaded, text, setting, progress)
    out.print(attention_table(found))
    return found.as_json(), draw_attention(found, setting, output)
