"""`pi-lora export`."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from pi_lora.cli.app import LIBRARIES, app, out, progress_bar, working
from pi_lora.cli.options import ModelName

export_app = typer.Typer(no_args_is_help=True, help="Write a model in the format of another engine.")
app.add_typer(export_app, name="export")


@export_app.command("gguf")
def gguf(
    model: ModelName,
    output: Annotated[Path | None, Option(metavar="FILE", help="models/<model>.gguf by default.")] = None,
    converter: Annotated[Path | None, Option(help="convert_hf_to_gguf.py of llama.cpp; else in $LLAMA_CPP.")] = None,
    dtype: Annotated[Literal["f32", "f16", "bf16", "q8_0"] | None, Option(help="Else that of the weights.")] = None,
) -> None:
    """Convert a model, or a run after merging it, with llama.cpp's converter; set its window, and check it."""
    with working(LIBRARIES):
        from pi_lora.merging.llama_cpp import export_gguf
    name = Path(model).resolve().name if Path(model).exists() else model.rpartition("/")[2].rpartition(":")[2]
    file = output or Path("models") / f"{name.removesuffix('.gguf')}.gguf"
    with progress_bar("exporting") as progress:
        exported = export_gguf(model, file, converter, dtype, progress)
    out.lines(*exported.lines(), f"{file}: written for llama.cpp")
