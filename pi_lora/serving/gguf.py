"""A model as a GGUF file with its whole window, by llama.cpp's own converter."""

import math
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.gguf_reader import ReaderTensor
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata

from pi_lora.errors import ModelError, RunExistsError
from pi_lora.models.source import ModelSource

CONVERTER = "convert_hf_to_gguf.py"
ARCHITECTURE = "general.architecture"
DIVISORS = "rope_freqs.weight"
# Architectures whose graph in llama.cpp divides the frequencies by the tensor DIVISORS, as for Llama 3.1.
READERS_OF_DIVISORS = (
    "apertus",
    "arcee",
    "deci",
    "exaone",
    "exaone-moe",
    "exaone4",
    "granite",
    "granitehybrid",
    "granitemoe",
    "llama",
    "llama4",
    "minicpm",
    "mistral3",
    "step35",
)
HOW_TO_GET_CONVERTER = (
    "it is in llama.cpp's repository (github.com/ggml-org/llama.cpp), and in the source package of llama-cpp-python"
)


def find_converter(model: ModelSource, output: Path, converter: Path | None = None) -> Path:
    """Return the script of llama.cpp that writes a model to the GGUF file `output`.

    It is in the folder `converter`, or else in `$LLAMA_CPP`. Raise ModelError if there is none, or if it drops the
    scaling of the model; RunExistsError if `output` exists.
    """
    script = Path(converter or os.environ.get("LLAMA_CPP", "."), CONVERTER)
    if not script.is_file():
        raise ModelError(
            f"{script}: no such converter; {HOW_TO_GET_CONVERTER}; name its folder with --converter, or in LLAMA_CPP"
        )
    if model.rope.method == "dynamic":
        raise ModelError(f"{model.name}: llama.cpp's converter drops the scaling `dynamic`; use another scaling")
    if output.exists():
        raise RunExistsError(f"{output}: already exists and is not overwritten; choose another --output or remove it")
    return script


def export_gguf(model: ModelSource, output: Path, script: Path, outtype: str | None = None) -> None:
    """Write full weights to the GGUF file `output` with the converter `script`, whole or not at all.

    `outtype` is by default the dtype of the weights. Raise ModelError if the converter fails or drops the scaling.
    """
    model.base.download_weights()
    if not outtype:
        # The converter names bfloat16 bf16.
        outtype = model.base.config.get("dtype", "float32").replace("float", "f")
    with TemporaryDirectory(dir=output.parent) as folder:
        file = Path(folder) / output.name
        words = [script, model.base.path, "--outfile", file, "--outtype", outtype]
        completed = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        if completed.returncode:
            reason = completed.stderr.strip().rpartition("\n")[2]
            raise ModelError(
                f"{script}: cannot convert {model.name} ({reason}); see what it needs, and which models it knows"
            )
        _add_divisors_and_attention_factor(file, model)
        reader: Any = GGUFReader(file, "r+")
        architecture = _value(reader, ARCHITECTURE)
        if not _has_scaling(reader, architecture, model):
            raise ModelError(
                f"{model.name}: llama.cpp's converter drops this scaling of {architecture} models; serve it with vLLM"
            )
        _set_window(reader, architecture, model.window)
        file.replace(output)


def _value(reader: Any, key: str) -> Any:
    """Return the value of a key in the metadata, or None."""
    field = reader.get_field(key)
    return field.contents() if field else None


def _add_divisors_and_attention_factor(file: Path, model: ModelSource) -> None:
    """Rewrite a GGUF file with the list of divisors of its model, if llama.cpp reads it for this architecture, and with
    the factor of the attention under the key that llama.cpp reads.
    """
    rope = model.rope.parameters
    is_list = model.rope.method == "factors"
    factor = rope.get("attention_factor")
    if rope["rope_type"] == "yarn" and factor is not None:
        # llama.cpp multiplies by YaRN's default.
        factor /= 0.1 * math.log(rope["factor"]) + 1
    elif not is_list:
        return
    reader: Any = GGUFReader(file)
    architecture = _value(reader, ARCHITECTURE)
    # llama.cpp computes this number itself.
    removed = [f"{architecture}.rope.scaling.yarn_attn_factor"]
    if is_list and not _has_long_divisors(reader):
        if architecture not in READERS_OF_DIVISORS:
            return
        # Under the type `longrope` llama.cpp looks for two other tensors.
        removed.append(f"{architecture}.rope.scaling.type")
        reader.tensors.append(_tensor_of(rope["long_factor"]))
    attention_factor = MetadataDetails(GGUFValueType.FLOAT32, 1.0 if factor is None else factor)
    rewritten = file.with_suffix(".divisors")
    writer = GGUFWriter(rewritten, architecture)
    added = {f"{architecture}.rope.scaling.attn_factor": attention_factor}
    copy_with_new_metadata(reader, writer, added, removed)
    rewritten.replace(file)


def _has_long_divisors(reader: Any) -> bool:
    return any(tensor.name.startswith("rope_factors_long") for tensor in reader.tensors)


def _tensor_of(divisors: list[float]) -> ReaderTensor:
    data = np.array(divisors, dtype=np.float32)
    return ReaderTensor(
        name=DIVISORS,
        tensor_type=GGMLQuantizationType.F32,
        shape=np.array(data.shape, dtype=np.uint32),
        n_elements=data.size,
        n_bytes=data.nbytes,
        data_offset=0,
        data=data,
        field=None,  # type: ignore[arg-type]  # where a file that was read says what this says
    )


def _has_scaling(reader: Any, architecture: str, model: ModelSource) -> bool:
    """Whether a GGUF file has the scaling of a model, and llama.cpp applies it. The converter of llama-cpp-python
    0.3.36 drops all scalings of Gemma, Gemma 2, StableLM, Phi and Cohere, `llama3` of all but models like LLaMA, `pi`
    of Gemma 4, and lists of divisors of all but Phi-3 and MiniCPM.
    """
    rope = model.rope.parameters
    divisors = next((tensor.data for tensor in reader.tensors if tensor.name == DIVISORS), None)
    kind = model.rope.kind
    if kind.in_gguf == "name":
        return bool(_value(reader, f"{architecture}.rope.scaling.type") == rope["rope_type"])
    if kind.in_gguf == "divisors":
        return _has_long_divisors(reader) or (divisors is not None and architecture in READERS_OF_DIVISORS)
    if rope["rope_type"] == "proportional" and rope.get("factor"):
        divisor = 1.0 if divisors is None else divisors[0]
        if not math.isclose(divisor, rope["factor"], rel_tol=1e-3):
            return False
    if model.rope.method == "theta":
        theta = _value(reader, f"{architecture}.rope.freq_base") or 0.0
        return math.isclose(theta, rope["rope_theta"], rel_tol=1e-3)
    return True


def _set_window(reader: Any, architecture: str, window: int) -> None:
    """Set `context_length` to L': under `pi` the converter writes L, where llama-server and Ollama stop."""
    field = reader.get_field(f"{architecture}.context_length")
    field.parts[field.data[0]][0] = window
    reader.data.flush()
