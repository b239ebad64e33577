"""`pi-lora merge` and `pi-lora export gguf`."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.types import PositiveInt

from pi_lora.cli.app import EXTEND, LIBRARIES, app, out, progress_bar, working
from pi_lora.cli.options import (
    GROUP,
    Dtype,
    ModelName,
    Original,
    Probe,
    Scaling,
    Target,
    Trust,
    extension_of,
    read_length,
)
from pi_lora.scaling.config import Method

export_app = App(name="export", help="Write a model in the format of another engine.", group=EXTEND, sort_key=4)
app.command(export_app)


@app.command(group=EXTEND, sort_key=2)
def merge(
    run: Annotated[Path, Parameter(name="RUN", help="A run or adapter: a folder or a hub id.")],
    /,
    *,
    trust: Annotated[Trust, GROUP] = Trust(),
    base: Annotated[str | None, Parameter(help="Base model, if it moved or is not named.")] = None,
    original: Original = None,
    target: Target = None,
    scaling: Scaling = None,
    reference: Annotated[bool, Parameter(help="Also write answers for check-server into the folder.")] = False,
    sibling: Annotated[bool, Parameter(help="--base is a sibling of the base it was tuned on.")] = False,
    output: Annotated[Path | None, Parameter(help="A new folder; models/<run> by default.")] = None,
    dtype: Dtype = None,
    check: Annotated[
        Literal["tensors", "logits", "none"], Parameter(help="Written tensors, or logits too, against base + adapter.")
    ] = "tensors",
) -> None:
    """Add an adapter to the weights of its base, with the scaling written for every engine."""
    extension = extension_of(target, original, scaling)
    with working(LIBRARIES):
        from pi_lora.merging.merging import merge
        from pi_lora.models.model import find
        from pi_lora.serving.reference import REFERENCE_FILE, Reader, write_reference
    with progress_bar("merging") as progress:
        to = output or Path("models") / run.resolve().name
        merged = merge(run, to, base, dtype, check, progress, extension, trust.permissions, sibling)
        if reference:
            model = find(str(to), permissions=trust.permissions)
            write_reference(Reader(model, progress=progress), to / REFERENCE_FILE)
    out.lines(*merged.lines(), f"{to}: merged; it loads like any model, its scaling is in config.json", "")
    out.lines("Serve it:", *merged.serving())


@app.command(group=EXTEND, sort_key=5)
def extend(
    model: ModelName,
    /,
    *,
    target: Annotated[PositiveInt, Parameter(converter=read_length, help="L', the window to extend to.")],
    scaling: Annotated[Method, Parameter(help="What pi-lora probe found best.")],
    original: Original = None,
    probe: Probe = None,
    output: Annotated[Path, Parameter(help="A new folder.")],
    trust: Annotated[Trust, GROUP] = Trust(),
) -> None:
    """Write MODEL with a window of --target tokens and no tuning, for every engine; its weights stay as they are."""
    with working(LIBRARIES):
        from pi_lora.merging.extending import extend
        from pi_lora.models.model import find
        from pi_lora.report.probe import read_probe
    found = find(model, extension_of(target, original, scaling), trust.permissions)
    with progress_bar("linking weights") as progress:
        serving = extend(found, output, read_probe(probe) if probe else None, progress)
    out.lines(f"{output}: written; it loads like any model, its scaling is in config.json", "", "Serve it:", *serving)


@export_app.command
def gguf(
    model: ModelName,
    /,
    *,
    output: Annotated[Path | None, Parameter(help="A file; models/<model>.gguf by default.")] = None,
    converter: Annotated[Path | None, Parameter(help="convert_hf_to_gguf.py of llama.cpp; else in $LLAMA_CPP.")] = None,
    dtype: Annotated[
        Literal["f32", "f16", "bf16", "q8_0"] | None, Parameter(help="By default that of the weights.")
    ] = None,
) -> None:
    """Convert a model, or a run after merging it, with llama.cpp's converter; set its window, and check it."""
    with working(LIBRARIES):
        from pi_lora.merging.llama_cpp import export_gguf
    name = Path(model).resolve().name if Path(model).exists() else model.rpartition("/")[2].rpartition(":")[2]
    file = output or Path("models") / f"{name.removesuffix('.gguf')}.gguf"
    with progress_bar("exporting") as progress:
        checked, *serving = export_gguf(model, file, converter, dtype, progress)
    out.lines(checked, f"{file}: written for llama.cpp", "", "Serve it:", *serving)
