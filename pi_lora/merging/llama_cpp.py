"""A model as a GGUF file, by llama.cpp's own converter: with its window, and checked."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from huggingface_hub import snapshot_download

from pi_lora.errors import ModelError, RunExistsError
from pi_lora.merging.merging import merge
from pi_lora.models.model import Model, find
from pi_lora.scaling.config import full_attention_rope
from pi_lora.serving.commands import llama_cpp_lines
from pi_lora.types import Progress, silent

CONVERTER = "convert_hf_to_gguf.py"
WHERE = "it is in llama.cpp's repository (github.com/ggml-org/llama.cpp), and in the source package of llama-cpp-python"
# What the converter reads of a model on the hub.
CONVERTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def export_gguf(
    name: str,
    output: Path,
    converter: Path | None = None,
    outtype: str | None = None,
    progress: Progress = silent,
) -> list[str]:
    """Write the model `name` to the GGUF file `output`, an adapter after merging it; whole or not at all. Return lines:
    what the file says about positions, and the commands that serve it and check the server.

    `converter` is llama.cpp's, or the folder that holds it; by default in `$LLAMA_CPP`. `outtype`
    is by default the dtype of the weights. Raise ModelError if there is no converter, it fails, or what it wrote is not
    the model; RunExistsError if `output` exists.
    """
    script = Path(converter or os.environ.get("LLAMA_CPP", CONVERTER)).expanduser()
    script = (script / CONVERTER if script.is_dir() else script).resolve()
    if not script.is_file():
        raise ModelError(f"{script}: no such converter; {WHERE}; name it with --converter, or its folder in LLAMA_CPP")
    if output.exists():
        raise RunExistsError(f"{output}: already exists and is not overwritten; choose another --output or remove it")
    found = find(name)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.stem}.", dir=output.parent) as making:
        file = Path(making) / "model.gguf"
        if found.adapter:
            found = find(str(merge(Path(name), Path(making) / output.stem, progress=progress).folder))
        folder = found.path
        if not Path(folder).is_dir():
            progress(0, 0, "downloading")
            folder = snapshot_download(folder, revision=found.revision, allow_patterns=CONVERTED)
        progress(0, 0, "converting")
        # bfloat16 is bf16 there.
        kind = outtype or found.base_config.get("dtype", "float32").replace("float", "f")
        command = [sys.executable, str(script), folder, "--outfile", str(file), "--outtype", kind]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().rpartition("\n")[2]
            raise ModelError(
                f"{script}: cannot convert {name} ({reason}); see what it needs, and which models it knows"
            )
        checked = _finish(file, name, found)
        shutil.move(file, output)
    return [checked, *llama_cpp_lines(output, found.window, name)]


def _finish(file: Path, name: str, found: Model) -> str:
    """Set `context_length` to L': under `pi` the converter writes L, where llama-server and Ollama stop. Return the
    positions that the file then has; raise ModelError if they are not those of the config (the converter drops
    `dynamic`).
    """
    reader: Any = GGUFReader(file, "r+")
    prefix, rope = reader.get_field("general.architecture").contents(), full_attention_rope(found.config)
    if (window := reader.get_field(f"{prefix}.context_length")) is not None:
        window.parts[window.data[0]][0] = found.window
        reader.data.flush()
    expected = {"rope.freq_base": rope["rope_theta"], "context_length": found.window}
    # `llama3` is a tensor of factors for the frequencies.
    if rope["rope_type"] not in ("default", "llama3"):
        expected = {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"], **expected}
    problems = []
    if rope["rope_type"] == "llama3" and all(tensor.name != "rope_freqs.weight" for tensor in reader.tensors):
        problems.append("no rope_freqs.weight")
    for key, value in expected.items():
        written = field.contents() if (field := reader.get_field(f"{prefix}.{key}")) else "missing"
        # The file has numbers in float32.
        if written != (np.float32(value) if isinstance(value, float) else value):
            problems.append(f"{key} is {written}")
    if problems:
        raise ModelError(f"{name}: the converter wrote another model, which is not kept: {'; '.join(problems)}")
    return "checked: " + ", ".join(f"{key} {value}" for key, value in expected.items())
