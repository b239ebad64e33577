"""A model as a GGUF file, by llama.cpp's own converter: with its window, and checked."""

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch.nn.functional import cross_entropy

from pi_lora.data.sources import standard_library
from pi_lora.errors import ModelError, RunExistsError
from pi_lora.merging.merging import merge
from pi_lora.models.load import FoundModel, find, is_adapter
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
    perplexities: Perplexities | None

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
    default the dtype of the weights.

    Raises:
        ModelError: there is no converter, it fails, or what it wrote is not the model.
        RunExistsError: `output` exists.
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
        folder, file = Path(found.base.path), Path(making) / "model.gguf"
        if is_adapter(name):
            folder = merge(Path(name), Path(making) / output.stem, progress=progress)
            found = replace(find(str(folder)), name=name)
        if not folder.is_dir():
            raise ModelError(f"{name}: the converter reads folders; download the model, and name its folder")
        progress(0, 0, "converting")
        kind = outtype or OUTTYPES[str(found.base.config.get("dtype") or "float32").removeprefix("torch.")]
        _convert(script, folder, file, kind)
        _set_window(file, found.window)
        facts = _checked(file, found)
        if importlib.util.find_spec("llama_cpp") is not None:
            progress(0, 0, "comparing")
            facts["perplexities"] = _compared(file, found, TOLERANCES[kind])
        shutil.move(file, output)
    return Exported.model_validate(facts)


def find_converter(given: Path | None = None) -> Path:
    """Return llama.cpp's converter: the one given, or in `$LLAMA_CPP`, on the path, or in the sources of a package."""
    if given is not None:
        places: Iterator[Path] = iter([given])
    elif named := os.environ.get("LLAMA_CPP"):
        places = iter([Path(named).expanduser()])
    else:
        places = _usual_places()
    looked = []
    for place in places:
        script = place / CONVERTER if place.is_dir() else place
        if script.is_file():
            return script.resolve()
        looked.append(str(script))
    where = ", ".join(looked) or CONVERTER
    raise ModelError(f"{where}: no such converter; {WHERE}; name it with --converter, or its folder in LLAMA_CPP")


def _usual_places() -> Iterator[Path]:
    if installed := shutil.which(CONVERTER):
        yield Path(installed)
    package = importlib.util.find_spec("llama_cpp")
    if package is not None and package.origin:
        # An editable installation lies in the sources.
        source = Path(package.origin).resolve().parent.parent / "vendor" / "llama.cpp"
        if source.is_dir():
            yield source


def _convert(script: Path, folder: Path, file: Path, outtype: str) -> None:
    command = [sys.executable, str(script), str(folder), "--outfile", str(file), "--outtype", outtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not file.is_file():
        said = [line for line in done.stderr.splitlines() if line.strip()]
        reason = said[-1].strip() if said else f"exit status {done.returncode}"
        advice = "install the package" if "ModuleNotFoundError" in reason else "see whether it knows this model"
        raise ModelError(f"{script}: cannot convert {folder.name} ({reason}); {advice}")


def _set_window(file: Path, window: int) -> None:
    """Set `context_length`, for which the converter takes `max_position_embeddings`: under `pi` that is L, and
    llama-server and Ollama stop there.
    """
    from gguf import GGUFReader  # an optional package

    reader: Any = GGUFReader(file, "r+")
    field = reader.get_field(f"{_value(reader, 'general.architecture')}.context_length")
    if field is None:
        raise ModelError(f"{file.name}: the converter wrote no context_length; it is another one than llama.cpp's")
    field.parts[field.data[0]][0] = window
    reader.data.flush()


def _checked(file: Path, found: FoundModel) -> dict[str, Any]:
    """Return what the file says about positions; raise ModelError if it is not what the config says."""
    from gguf import GGUFReader  # an optional package

    reader = GGUFReader(file)
    prefix = _value(reader, "general.architecture")
    rope = full_attention_rope(found.config)
    kind = rope.get("rope_type", "default")
    scaled = kind != "default"
    expected = {
        "tensors": True,
        "rope.scaling.type": kind if scaled else "none",
        "rope.scaling.factor": float(rope["factor"]) if scaled else 1.0,
        "rope.freq_base": float(rope["rope_theta"]),
        "context_length": found.window,
    }
    written = {
        "tensors": len(reader.tensors) > 0,
        "rope.scaling.type": _value(reader, f"{prefix}.rope.scaling.type") or "none",
        "rope.scaling.factor": _value(reader, f"{prefix}.rope.scaling.factor") or 1.0,
        "rope.freq_base": _value(reader, f"{prefix}.rope.freq_base") or 10000.0,
        "context_length": _value(reader, f"{prefix}.context_length"),
    }
    if wrong := [
        f"{key} is {written[key]} instead of {value}"
        for key, value in expected.items()
        if not (written[key] == value or (isinstance(value, float) and math.isclose(written[key], value, rel_tol=1e-6)))
    ]:
        raise ModelError(f"{found.name}: the converter wrote another model, which is not kept: {'; '.join(wrong)}")
    return {
        "scaling": written["rope.scaling.type"],
        "factor": written["rope.scaling.factor"],
        "window": written["context_length"],
        "theta": written["rope.freq_base"],
        "perplexities": None,
    }


def _value(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _compared(file: Path, found: FoundModel, tolerance: float) -> Perplexities:
    """Compare perplexities of a text that is longer than L, if a processor reads so much in a moment."""
    loaded = found.load("float32")
    text = next(each.text for each in standard_library(held_out=True).documents() if len(each.text) > 10 * TOKENS)
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
    perplexity = math.exp(cross_entropy(logits, torch.tensor(ids[1:])))
    return perplexity, list(model.tokenize(text.encode(), add_bos=True))
