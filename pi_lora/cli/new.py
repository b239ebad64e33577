"""`pi-lora new`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from pi_lora.cli.app import app, err, out, working
from pi_lora.cli.options import MOST_TOKENS, GpuName, ModelName, TrustRemoteCode
from pi_lora.errors import PiLoraError, RunExistsError
from pi_lora.types import Allowed


@app.command()
def new(
    model: ModelName,
    target: Annotated[int | None, Option(min=1, max=MOST_TOKENS, help="L', the window to stretch to.")] = None,
    gpu: GpuName = None,
    data: Annotated[list[str] | None, Option(help="Text to tune on: a file, folder, glob or hub id.")] = None,
    output: Annotated[Path | None, Option(metavar="FILE", help="The recipe; MODEL_TARGET.yaml otherwise.")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a recipe that stretches MODEL to --target tokens on the GPU that is here, or on --gpu."""
    with working("reading the config"):
        from pi_lora.data.sources import find_corpus
        from pi_lora.planning.choosing import Wish, choose, file_for, recipe_text
        from pi_lora.planning.planning import device_here, find_gpu, find_shape
        from pi_lora.planning.text import plan_lines
        from pi_lora.scaling.config import window_of

        allowed = Allowed(trust_remote_code)
        window = window_of(find_shape(model, allowed=allowed)[0])
        device = find_gpu(gpu) if gpu else device_here()
    if target is None:
        if not asks():
            raise PiLoraError(f"--target: missing; {model} reads {window} tokens, name more, as --target {4 * window}")
        target = typer.prompt(f"{model} reads {window} tokens; stretch it to", 4 * window, err=True)
    file = output or file_for(model, target)
    if file.exists():
        raise RunExistsError(f"{file}: exists, and is not overwritten; remove it, or name another file with --output")
    if asks() and not data:
        given = typer.prompt("Text to tune on (file, folder, glob or hub id; empty: a public corpus)", "", err=True)
        data = [given] if given else None
    wish = Wish(model, target, device, tuple({"name": name} for name in data or ()))
    plan = choose(wish, lambda source: find_corpus(source).size(), allowed)
    with file.open("x", encoding="utf-8") as recipe:
        recipe.write(recipe_text(plan, file))
    out.lines(*plan_lines(plan))
    if not data:
        sources = " and ".join(source.name for source in plan.recipe.data.source)
        err.lines(f"--data: not given; the recipe reads {sources}")
    out.lines(f"{file}: written; read it, then: pi-lora train {shlex.quote(str(file))}")


def asks() -> bool:
    """Whether somebody is there to answer."""
    return sys.stdin.isatty() and err.is_terminal
