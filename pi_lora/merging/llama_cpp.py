"""A model as a GGUF file, by llama.cpp's own converter: with its window, and checked."""

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch.nn.functional import cross_entropy

from pi_lora.data.sources import standard_library
from pi_lora.errors import ModelError, RunExistsError
from pi_lora.merging.merging import merge
from pi_lora.models.model import Model, find, is_adapter
from pi_lora.scaling.config import full_attention_rope, method_of
from pi_lora.types import Progress, silent

CONVERTER = "convert_hf_to_gguf.py"
WHERE = "it is in llama.cpp's repository (github.com/ggml-org/llama.cpp), and in the source package of llama-cpp-python"
Outtype = Literal["f32", "f16", "bf16", "q8_0"]
OUTTYPES: Mapping[str, Outtype] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
# The largest relative difference of perplexity between transformers in float32 and llama.cpp. Without its scaling a
# model differs by tens of percent.
TOLERANCES: Mapping[Outtype, float] = {"f32": 0.01, "f16": 0.01, "bf16": 0.01, "q8_0": 0.05}
# Tokens of the text for it: a processor reads no more in a moment.
TOKENS = 1024


class Perplexities(BaseModel, frozen=True):
    """The perplexity of one text in transformers and in llama.cpp, and whether llama.cpp tokenizes it alike."""

    tokens: int
    expected: float
    found: float
    same_tokens: bool


class Exported(BaseModel, frozen=True):
    """A GGUF file: its rope scaling, `context_length` (L') and theta; no perplexities without llama-cpp-python."""

    scaling: str
    factor: float
    window: int
    theta: float
    perplexities: Perplexities | None = None

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        scaled = f"rope scaling {self.scaling}, factor {self.factor:g}" if self.scaling != "none" else "no rope scaling"
        told = [f"checked: {scaled}, theta {self.theta:g}, context_length {self.window}"]
        if (both := self.perplexities) is None:
            return [*told, "perplexity not compared: llama-cpp-python is not installed"]
        compared = f"perplexity of {both.tokens} tokens: {both.found:.3f} in llama.cpp, {both.expected:.3f} here"
        other = [] if both.same_tokens else ["llama.cpp tokenizes this text otherwise than the model's own tokenizer"]
        return [*told, compared, *other]


def export_gguf(
    name: str,
    output: Path,
    converter: Path | None = None,
    outtype: Outtype | None = None,
    progress: Progress = silent,
) -> Exported:
    """Write the model `name` to the GGUF file `output`, an adapter after merging it; whole or not at all.

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
        folder, file = Path(found.path), Path(making) / "model.gguf"
        if is_adapter(name):
            folder = merge(Path(name), Path(making) / output.stem, progress=progress).folder
            found = replace(find(str(folder)), name=name)
        if not folder.is_dir():
            raise ModelError(f"{name}: the converter reads folders; download the model, and name its folder")
        progress(0, 0, "converting")
        kind = outtype or OUTTYPES[str(found.base_config.get("dtype") or "float32").removeprefix("torch.")]
        _convert(script, folder, file, kind)
        _set_window(file, found.window)
        exported = _checked(file, found)
        if importlib.util.find_spec("llama_cpp") is not None:
            progress(0, 0, "comparing")
            exported = exported.model_copy(update={"perplexities": _compared(file, found, TOLERANCES[kind])})
        shutil.move(file, output)
    return exported


def find_converter(given: Path | None = None) -> Path:
    """Return llama.cpp's converter: the one given, or in `$LLAMA_CPP`, on the path, or in the sources of a package."""
    if place := given or os.environ.get("LLAMA_CPP"):
        places = [Path(place).expanduser()]
    else:
        installed, package = shutil.which(CONVERTER), importlib.util.find_spec("llama_cpp")
        places = [Path(installed)] if installed else []
        if package is not None and package.origin:
            # An editable installation lies in the sources.
            places += [Path(package.origin).resolve().parent.parent / "vendor" / "llama.cpp"]
    scripts = [place / CONVERTER if place.is_dir() else place for place in places]
    if script := next((script for script in scripts if script.is_file()), None):
        return script.resolve()
    where = ", ".join(str(script) for script in scripts) or CONVERTER
    raise ModelError(f"{where}: no such converter; {WHERE}; name it with --converter, or its folder in LLAMA_CPP")


def _convert(script: Path, folder: Path, file: Path, outtype: str) -> None:
    command = [sys.executable, str(script), str(folder), "--outfile", str(file), "--outtype", outtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not file.is_file():
        said = [line for line in done.stderr.splitlines() if line.strip()]
        reason = said[-1].strip() if said else f"exit status {done.returncode}"
        advice = "install the package" if "ModuleNotFoundError" in reason else "see whether it knows this model"
        raise ModelError(f"{script}: cannot convert {folder.name} ({reason}); {advice}")


def _set_window(file: Path, window: int) -> None:
    """Set `context_length` to L': the converter writes L there under `pi`, where llama-server and Ollama stop."""
    from gguf import GGUFReader  # an optional package

    reader: Any = GGUFReader(file, "r+")
    field = reader.get_field(f"{reader.get_field('general.architecture').contents()}.context_length")
    if field is None:
        raise ModelError(f"{file.name}: the converter wrote no context_length; it is another one than llama.cpp's")
    field.parts[field.data[0]][0] = window
    reader.data.flush()


def _checked(file: Path, found: Model) -> Exported:
    """Return what the file says about positions; raise ModelError if it is not what the config says."""
    from gguf import GGUFReader  # an optional package

    reader: Any = GGUFReader(file)
    prefix = reader.get_field("general.architecture").contents()
    rope = full_attention_rope(found.config)
    scaled = rope.get("rope_type", "default") != "default"
    expected = {
        "tensors": True,
        "rope.scaling.type": rope["rope_type"] if scaled else "none",
        "rope.scaling.factor": float(rope["factor"]) if scaled else 1.0,
        "rope.freq_base": float(rope["rope_theta"]),
        "context_length": found.window,
    }
    # What an absent field means.
    written: dict[str, Any] = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.freq_base": 10000.0}
    fields = ((key, reader.get_field(f"{prefix}.{key}")) for key in expected)
    written |= {key: field.contents() for key, field in fields if field is not None}
    written["tensors"] = bool(reader.tensors)
    if wrong := [
        f"{key} is {written.get(key)} instead of {value}"
        for key, value in expected.items()
        if written.get(key) != value
        and not (isinstance(value, float) and math.isclose(written[key], value, rel_tol=1e-6))
    ]:
        raise ModelError(f"{found.name}: the converter wrote another model, which is not kept: {'; '.join(wrong)}")
    return Exported(
        scaling=written["rope.scaling.type"],
        factor=written["rope.scaling.factor"],
        theta=written["rope.freq_base"],
        window=written["context_length"],
    )


def _compared(file: Path, found: Model, tolerance: float) -> Perplexities:
    """Compare perplexities of a text that is longer than L, if a processor reads so much in a moment."""
    loaded = found.load("float32")
    text = next(each.text for each in standard_library("test").documents() if len(each.text) > 10 * TOKENS)
    whole = loaded.tokenizer(text)["input_ids"]
    ids = whole[: min(TOKENS, found.window)]
    rows = torch.tensor([ids], device=loaded.model.device)
    with torch.no_grad():
        logits = loaded.model(rows).logits[0, :-1].float()
    expected = math.exp(cross_entropy(logits, rows[0, 1:]))
    del loaded
    perplexity, tokens = perplexity_in_llama_cpp(file, ids, text)
    if not abs(perplexity / expected - 1) <= tolerance:
        both = f"perplexity is {perplexity:.3f} in llama.cpp and {expected:.3f} here, on {len(ids)} tokens"
        raise ModelError(f"{found.name}: the converted model is another one and is not kept: {both}")
    return Perplexities(tokens=len(ids), expected=expected, found=perplexity, same_tokens=tokens == whole)


def perplexity_in_llama_cpp(file: Path, ids: list[int], text: str, **options: Any) -> tuple[float, list[int]]:
    """Return the perplexity of `ids` by llama.cpp, and its own tokens of `text`; `options` are the library's."""
    from llama_cpp import Llama  # an optional package

    model = Llama(str(file), n_ctx=len(ids), logits_all=True, verbose=False, **options)
    model.eval(ids)
    logits = torch.from_numpy(model.scores[: len(ids) - 1]).float()
    return math.exp(cross_entropy(logits, torch.tensor(ids[1:]))), list(model.tokenize(text.encode(), add_bos=True))
