"""What other engines make of a merged folder: vLLM's and SGLang's rules on its config, llama.cpp itself on a GGUF."""

import argparse
import json
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
from conftest import BUILTIN, small_recipe, train
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from pi_lora.merging.llama_cpp import CONVERTER, export_gguf
from pi_lora.merging.merging import merge
from pi_lora.models.model import load

ORIGINAL, TARGET = 64, 128
# The keys that SGLang takes for the window, in its order; the first that a config has wins.
SGLANG_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")


def vllm_window(config: dict[str, Any], rope: dict[str, Any], tokenizer: dict[str, Any]) -> int:
    """`_get_and_verify_max_len` of vllm/config/model.py, for a model with one rope and no `--max-model-len`."""
    window = min(config["max_position_embeddings"], tokenizer["model_max_length"])
    if rope["rope_type"] in ("su", "longrope", "llama3"):
        return int(config.get("original_max_position_embeddings", window))
    if rope["rope_type"] == "yarn":
        window = rope["original_max_position_embeddings"]
    return int(window * rope.get("factor", 1))


def ctranslate2_theta(config: dict[str, Any]) -> float:
    """`get_rotary_params` of ctranslate2/converters/transformers.py, under transformers 4."""
    scaling = config["rope_scaling"]
    theta = scaling.get("rope_theta", 10_000.0) if scaling else config.get("rope_theta", 10_000.0)
    return float(theta)


def sglang_window(config: dict[str, Any], scaling: dict[str, Any] | None) -> int:
    """`get_context_length` of sglang/srt/utils/hf_transformers/common.py."""
    factor = (scaling or {}).get("factor", 1)
    if "original_max_position_embeddings" in (scaling or {}) or (scaling or {}).get("rope_type") == "llama3":
        factor = 1
    return int(factor * next(config[key] for key in SGLANG_KEYS if config.get(key) is not None))


@pytest.fixture(scope="module", params=["pi", "direct", "dynamic", "yarn"])
def merged(request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    training = {**small_recipe(small_model).training.model_dump(), "steps": 1}
    run = train(small_recipe(small_model, scaling=request.param, training=training), folder / "run")
    return merge(run, folder / "merged").folder


def test_vllm_and_sglang_find_the_target_window(merged: Path) -> None:
    """Both as transformers 5 gives them the config, and as 4 does, which leaves it as it is written."""
    written = json.loads((merged / "config.json").read_text())
    tokenizer = json.loads((merged / "tokenizer_config.json").read_text())
    in_5 = AutoConfig.from_pretrained(merged)
    assert vllm_window(in_5.to_dict(), in_5.rope_parameters, tokenizer) == TARGET
    assert sglang_window(in_5.to_dict(), in_5.rope_scaling) == TARGET
    in_4 = {"rope_type": "default", "rope_theta": written["rope_theta"], **(written["rope_scaling"] or {})}
    assert vllm_window(written, in_4, tokenizer) == TARGET
    assert sglang_window(written, written["rope_scaling"]) == TARGET


def test_ctranslate2_finds_theta(merged: Path) -> None:
    written = json.loads((merged / "config.json").read_text())
    if written["rope_parameters"]["rope_type"] in ("dynamic", "yarn"):
        pytest.skip("CTranslate2 refuses this scaling")
    assert ctranslate2_theta(written) == written["rope_parameters"]["rope_theta"] != 10_000


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
    exported = export_gguf(str(stretched), file, script, "f32")
    assert "rope.scaling.type linear, rope.scaling.factor 4.0" in exported
    assert exported.endswith("context_length 1024")

    from llama_cpp import Llama

    loaded = load(str(stretched), dtype="float32")
    text = Path(argparse.__file__).read_text()
    ids = loaded.tokenizer(text)["input_ids"]
    metadata = Llama(str(file), verbose=False).metadata
    assert metadata["llama.context_length"] == "1024"

    def perplexity(**options: Any) -> float:
        model = Llama(str(file), n_ctx=1024, logits_all=True, verbose=False, **options)
        assert model.tokenize(text.encode(), add_bos=True) == ids
        model.eval(ids[:1024])
        return math.exp(cross_entropy(torch.from_numpy(model.scores[:1023]).float(), torch.tensor(ids[1:1024])))

    with torch.no_grad():
        expected = math.exp(
            cross_entropy(loaded.model(torch.tensor([ids[:1024]])).logits[0, :-1], torch.tensor(ids[1:1024]))
        )
    scaled, unscaled = perplexity(), perplexity(rope_freq_scale=1.0)
    assert scaled == pytest.approx(expected, rel=0.01)
    # Tuned for a moment only, it may be better or worse without its scaling, and is another model in any case.
    assert abs(unscaled / scaled - 1) > 0.1
