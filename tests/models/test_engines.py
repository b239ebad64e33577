"""What other engines make of a merged folder: vLLM's and SGLang's rules on its config, llama.cpp itself on a GGUF."""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from typing import Any

import pytest
from conftest import BUILTIN, small_recipe, train
from transformers import AutoConfig

from pi_lora.merging.llama_cpp import CONVERTER, export_gguf, perplexity_in_llama_cpp
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
    """The export sets the window and compares perplexity and tokens; here what it compares with is another scaling."""
    packages, script = llama_cpp
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    file = tmp_path / "model.gguf"
    exported = export_gguf(str(stretched), file, script, "f32")
    assert exported.model_dump(exclude={"perplexities"}) == {
        "scaling": "linear",
        "factor": 4.0,
        "window": 1024,
        "theta": 500.0,
    }
    assert (compared := exported.perplexities) is not None
    assert compared.tokens == 1024
    assert compared.same_tokens
    assert compared.found == pytest.approx(compared.expected, rel=0.01)

    from llama_cpp import Llama

    text = Path(argparse.__file__).read_text()
    ids = load(str(stretched)).tokenizer(text)["input_ids"][:1024]
    assert Llama(str(file), verbose=False).metadata["llama.context_length"] == "1024"
    scaled, _ = perplexity_in_llama_cpp(file, ids, text)
    unscaled, _ = perplexity_in_llama_cpp(file, ids, text, rope_freq_scale=1.0)
    # Tuned for a moment only, it may be better or worse without its scaling, and is another model in any case.
    assert abs(unscaled / scaled - 1) > 0.1
