"""What other engines make of a merged folder: vLLM's and SGLang's rules on its config, llama.cpp itself on a GGUF."""

import argparse
import json
import math
import os
import subprocess
import tarfile
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BUILTIN, small_recipe, train
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from pi_lora.merge.merging import merge
from pi_lora.models.load import load

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
    return merge(run, folder / "merged")


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


LLAMA_CPP = "0.3.36"
# What that llama.cpp's own converter asks for.
CONVERTERS_TRANSFORMERS = "4.57.6"
# The converter knows tokenizers by a list of hashes, which holds the public ones; the built-in model's splits text the
# way SmolLM's does.
CONVERT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
convert_hf_to_gguf.main()
"""
PROBE = """
import json, sys
import numpy as np
from llama_cpp import Llama

def perplexity(model, ids):
    model.eval(ids)
    logits = model.scores[: len(ids) - 1].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    chosen = logits[np.arange(len(ids) - 1), ids[1:]]
    return float(np.exp((np.log(np.exp(logits).sum(-1)) - chosen).mean()))

path, given = sys.argv[1], json.load(sys.stdin)
options = {"n_ctx": len(given["ids"]), "logits_all": True, "verbose": False}
model = Llama(path, **options)
print(json.dumps({
    "metadata": model.metadata,
    "ids": model.tokenize(given["text"].encode(), add_bos=True),
    "perplexity": perplexity(model, given["ids"]),
    "unscaled": perplexity(Llama(path, rope_freq_scale=1.0, **options), given["ids"]),
}))
"""


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with llama.cpp, compiled, and beside it `llama.cpp`, the part of its sources that converts."""
    folder = tmp_path_factory.mktemp("llama_cpp")
    venv.create(folder / "env", with_pip=True)
    pip = [folder / "env" / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    package = f"llama-cpp-python=={LLAMA_CPP}"
    sources = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder, package]
    if subprocess.run([*pip, "download", *sources], env=outside(), check=False).returncode:
        pytest.skip(f"{package} cannot be had from a package registry")
    converter = [f"transformers=={CONVERTERS_TRANSFORMERS}", f"torch=={torch.__version__.partition('+')[0]}"]
    needs = [*converter, "sentencepiece", "gguf==0.19.0"]
    subprocess.run([*pip, "install", package, *needs], env=outside(), check=True)
    with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(folder / "sources", filter="data")
    next(folder.glob("sources/*/vendor/llama.cpp")).rename(folder / "llama.cpp")
    return folder


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
    return merge(train(recipe, folder / "run"), folder / "merged")


def outside() -> dict[str, str]:
    """The variables of this process without what would lead another Python back into this environment."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def perplexity(folder: Path, ids: list[int]) -> float:
    rows = torch.tensor([ids])
    with torch.no_grad():
        logits = load(str(folder), dtype="float32").model(rows).logits
    return math.exp(cross_entropy(logits[0, :-1], rows[0, 1:]))


@pytest.mark.slow
def test_llama_cpp_reads_the_scaling_and_agrees_at_the_target_window(
    llama_cpp: Path, stretched: Path, tmp_path: Path
) -> None:
    python, gguf = llama_cpp / "env" / "bin" / "python", tmp_path / "model.gguf"

    def run(*arguments: object, **options: Any) -> str:
        done = subprocess.run(
            [str(each) for each in arguments],
            env=outside(),
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
            **options,
        )
        return done.stdout

    run(python, "-c", CONVERT, llama_cpp / "llama.cpp", stretched, "--outfile", gguf, "--outtype", "f32")
    text = Path(argparse.__file__).read_text()
    ids = load(str(stretched)).tokenizer(text)["input_ids"][:1024]
    given = json.dumps({"text": text, "ids": ids})

    found = json.loads(run(python, "-c", PROBE, gguf, input=given))
    assert found["metadata"]["llama.rope.scaling.type"] == "linear"
    assert float(found["metadata"]["llama.rope.scaling.factor"]) == 4
    assert float(found["metadata"]["llama.rope.freq_base"]) == 500
    assert found["ids"][:1024] == ids
    expected = perplexity(stretched, ids)
    assert found["perplexity"] == pytest.approx(expected, rel=0.01)
    # Tuned for a moment only, it may be better or worse without its scaling, and is another model in any case.
    assert abs(found["unscaled"] / expected - 1) > 0.1

    # The converter takes `max_position_embeddings` for the window, L; llama-server and Ollama would stop there.
    assert found["metadata"]["llama.context_length"] == "256"
    run(llama_cpp / "env" / "bin" / "gguf-set-metadata", gguf, "llama.context_length", "1024", "--force")
    longer = json.loads(run(python, "-c", PROBE, gguf, input=given))
    assert longer == {**found, "metadata": {**found["metadata"], "llama.context_length": "1024"}}
