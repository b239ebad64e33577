"""`pi-lora merge`."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from pi_lora.cli.app import Dtype, app, out, progress_bar, working
from pi_lora.errors import PiLoraError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run or adapter folder.")],
    base: Annotated[str | None, typer.Option(metavar="MODEL", help="The base, if it has moved.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="models/<run> by default.")] = None,
    dtype: Dtype = None,
    onto: Annotated[Literal["base", "quantized"], typer.Option(help="After QLoRA: base as stored, or NF4.")] = "base",
    shard_size: Annotated[str | None, typer.Option(metavar="SIZE", help="Of a file (5GB); else the base's.")] = None,
    verify: Annotated[bool, typer.Option(help="Compare the merged weights with base + adapter.")] = True,
) -> None:
    """Add an adapter to the weights of its base, with the scaling written for every engine."""
    size = size_in(shard_size) if shard_size else None
    with working("loading libraries"):
        from pi_lora.merge.facts import read_merge
        from pi_lora.merge.merging import merge
    with progress_bar("merging") as progress:
        folder = merge(run, output or Path("models") / run.resolve().name, base, dtype, onto, size, verify, progress)
    done = f"{folder}: merged; it loads like any model, its scaling is in config.json"
    out.print(*read_merge(folder).lines(), done, sep="\n", highlight=False, soft_wrap=True)


def size_in(text: str) -> int:
    """Return the bytes of a size such as 5GB or 500MB.

    >>> size_in("500MB")
    500000000
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]B|)", text.upper())
    if match is None or (size := int(float(match.group(1)) * UNITS[match.group(2)])) <= 0:
        raise PiLoraError(f"--shard-size: {text}: not the size of a file; write it as 5GB or 500MB")
    return size
