"""What llama.cpp makes of a merged model."""

import argparse
import math
import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from conftest import BUILTIN, small_recipe, train
from pi_lora.api import load, merge
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.serving.gguf import CONVERTER, export_gguf

LLAMA_CPP = "0.3.36"
# The converter knows tokenizers by a list of hashes, which holds the public ones; the built-in model's splits text the
# way SmolLM's does.
CONVERT = """
import sys
sys.path[:0] = [{sources!r}]
sys.path.append({packages!r})
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
convert_hf_to_gguf.main()
"""


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The packages of an environment with llama.cpp, compiled, and a script that calls the converter in its sources."""
    folder = tmp_path_factory.mktemp("llama_cpp")
    venv.create(folder / "env", with_pip=True)
    pip = [folder / "env" / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    package = f"llama-cpp-python=={LLAMA_CPP}"
    sources = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder, package]
    if subprocess.run([*pip, "download", *sources], env=outside(), check=False).returncode:
        pytest.skip(f"{package} cannot be had from a package registry")
    subprocess.run([*pip, "install", package, "sentencepiece"], env=outside(), check=True)
    with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(folder / "sources", filter="data")
    (packages,) = folder.glob("env/lib/python*/site-packages")
    script = folder / CONVERTER
    own = next(folder.glob("sources/*/vendor/llama.cpp"))
    script.write_text(CONVERT.format(sources=str(own), packages=str(packages)))
    return packages, script


@pytest.fixture(scope="module")
def stretched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, 256 to 1024 tokens, tuned for a moment and merged."""
    training = {"steps": 20, "global_batch_size": 1, "per_device_batch_size": 1, "log_every": 1}
    recipe = small_recipe(
        BUILTIN,
        context={"target": 1024},
        training={**small_recipe(BUILTIN).training.model_dump(), **training, "learning_rate": 2.5e-3},
    )
    folder = tmp_path_factory.mktemp("stretched")
    return merge(train(recipe, folder / "run"), folder / "merged").folder


def outside() -> dict[str, str]:
    """The variables of this process without what would lead another Python back into this environment."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


@pytest.mark.slow
def test_llama_cpp_reads_the_scaling_and_agrees_at_the_target_window(
    llama_cpp: tuple[Path, Path], stretched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The perplexity of llama.cpp is that of transformers, which it is not without the scaling."""
    packages, script = llama_cpp
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    file = tmp_path / "model.gguf"
    export_gguf(resolve_model(str(stretched)), file, script, "f32")

    from llama_cpp import Llama

    loaded = load(ModelRef(str(stretched), dtype="float32"))
    text = Path(argparse.__file__).read_text()
    ids = loaded.tokenizer(text)["input_ids"]
    metadata = Llama(str(file), verbose=False).metadata
    assert metadata["llama.context_length"] == "1024"
    assert (metadata["llama.rope.scaling.type"], metadata["llama.rope.scaling.factor"]) == ("linear", "4.000000")

    def perplexity(**options: Any) -> float:
        model = Llama(str(file), n_ctx=1024, logits_all=True, verbose=False, **options)
        assert model.tokenize(text.encode(), add_bos=True) == ids
        model.eval(ids[:1024])
        return math.exp(cross_entropy(torch.from_numpy(model.scores[:1023]).float(), torch.tensor(ids[1:1024])))

    with torch.no_grad():
        expected = math.exp(
            cross_entropy(loaded.module(torch.tensor([ids[:1024]])).logits[0, :-1], torch.tensor(ids[1:1024]))
        )
    scaled, unscaled = perplexity(), perplexity(rope_freq_scale=1.0)
    assert scaled == pytest.approx(expected, rel=0.01)
    # Tuned for a moment only, it may be better or worse without its scaling, and is another model in any case.
    assert abs(unscaled / scaled - 1) > 0.1
