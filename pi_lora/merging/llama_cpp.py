"""A model as a GGUF file, by llama.cpp's own converter: with its window, and checked."""

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download

from pi_lora.errors import ModelError, RunExistsError
from pi_lora.merging.merging import merge
from pi_lora.models.model import Model, find, is_adapter
from pi_lora.scaling.config import full_attention_rope, method_of
from pi_lora.types import Progress, silent

CONVERTER = "convert_hf_to_gguf.py"
WHERE = "it is in llama.cpp's repository (github.com/ggml-org/llama.cpp), and in the source package of llama-cpp-python"
# What the converter reads of a model on the hub.
CONVERTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
Outtype = Literal["f32", "f16", "bf16", "q8_0"]
OUTTYPES: Mapping[str, Outtype] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def export_gguf(
    name: str,
    output: Path,
    converter: Path | None = None,
    outtype: Outtype | None = None,
    progress: Progress = silent,
) -> str:
    """Write the model `name` to the GGUF file `output`, an adapter after merging it; whole or not at all. Return a line
    on what the file says about positions.

    `converter` is llama.cpp's, or the folder that holds it; by default where `find_converter` finds it. `outtype` is by
    default the dtype of the weights. Raise ModelError if there is no converter, it fails, or what it wrote is not the
    model; RunExistsError if `output` exists.
    """
    script = find_converter(converter)
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("export gguf: checking the file needs the package gguf; pip install 'pi-lora[gguf]'")
    if output.exists():
        raise RunExistsError(f"{output}: already exists and is not overwritten; choose another --output or remove it")
    found = find(name)
    if method_of(found.config) == "dynamic":
        raise ModelError(f"{name}: llama.cpp's converter drops its scaling (dynamic); tune it with scaling: pi or yarn")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.stem}.", dir=output.parent) as making:
        file = Path(making) / "model.gguf"
        if is_adapter(name):
            found = find(str(merge(Path(name), Path(making) / output.stem, progress=progress).folder))
        folder = Path(found.path)
        if not folder.is_dir():
            progress(0, 0, "downloading")
            folder = Path(snapshot_download(found.path, revision=found.revision, allow_patterns=CONVERTED))
        progress(0, 0, "converting")
        kind = outtype or OUTTYPES[str(found.base_config.get("dtype") or "float32").removeprefix("torch.")]
        _convert(script, folder, file, kind)
        checked = _finish(file, name, found)
        shutil.move(file, output)
    return checked


def find_converter(given: Path | None = None) -> Path:
    """Return llama.cpp's converter: the one given, in `$LLAMA_CPP`, or on the path."""
    place = Path(given or os.environ.get("LLAMA_CPP") or shutil.which(CONVERTER) or CONVERTER).expanduser()
    script = place / CONVERTER if place.is_dir() else place
    if not script.is_file():
        raise ModelError(f"{script}: no such converter; {WHERE}; name it with --converter, or its folder in LLAMA_CPP")
    return script.resolve()


def _convert(script: Path, folder: Path, file: Path, outtype: str) -> None:
    command = [sys.executable, str(script), str(folder), "--outfile", str(file), "--outtype", outtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not file.is_file():
        messages = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        advice = "install the package" if "ModuleNotFoundError" in messages[-1] else "see whether it knows this model"
        raise ModelError(f"{script}: cannot convert {folder.name} ({messages[-1].strip()}); {advice}")


def _finish(file: Path, name: str, found: Model) -> str:
    """Set `context_length` to L': under `pi` the converter writes L, where llama-server and Ollama stop. Return the
    positions that the file then has; raise ModelError if they are not those of the config.
    """
    from gguf import GGUFReader  # an optional package

    reader: Any = GGUFReader(file, "r+")
    prefix, rope = reader.get_field("general.architecture").contents(), full_attention_rope(found.config)
    scaled = rope.get("rope_type", "default") != "default"
    window = reader.get_field(f"{prefix}.context_length")
    if window is not None:
        window.parts[window.data[0]][0] = found.window
        reader.data.flush()
    # By field: what it should say, and what an absent one means.
    expected: dict[str, tuple[Any, Any]] = {
        "rope.scaling.type": (rope["rope_type"] if scaled else "none", "none"),
        "rope.scaling.factor": (float(rope["factor"]) if scaled else 1.0, 1.0),
        "rope.freq_base": (float(rope["rope_theta"]), 10000.0),
        "context_length": (found.window, None),
    }
    problems = [] if reader.tensors else ["no tensors"]
    for key, (value, default) in expected.items():
        field = reader.get_field(f"{prefix}.{key}")
        written = default if field is None else field.contents()
        if written != value and not (isinstance(value, float) and math.isclose(written, value, rel_tol=1e-6)):
            problems.append(f"{key} is {written} instead of {value}")
    if problems:
        raise ModelError(f"{name}: the converter wrote another model, which is not kept: {'; '.join(problems)}")
    return "checked: " + ", ".join(f"{key} {value}" for key, (value, _) in expected.items())
