import json
import os
import subprocess
import venv
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pi_lora.errors import ModelError
from pi_lora.merging.merging import merge
from pi_lora.models.model import load

IDS = torch.randint(2, 1024, (2, 128), generator=torch.Generator().manual_seed(5))
OLD_TRANSFORMERS = "4.57.6"


@pytest.fixture(scope="module")
def merged(lora_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge(lora_run, tmp_path_factory.mktemp("merged") / "model").folder


@torch.no_grad()
def test_merged_logits_equal_the_runs(merged: Path, lora_run: Path, small_model: Path) -> None:
    run = load(str(lora_run))
    full = load(str(merged))
    assert (full.scale, full.window) == (run.scale, run.window) == (2, 128)
    torch.testing.assert_close(full.model(IDS).logits, run.model(IDS).logits, rtol=1e-5, atol=1e-5)
    assert (full.model(IDS).logits - load(str(small_model)).model(IDS).logits).abs().max() > 0.1


@torch.no_grad()
def test_plain_transformers_reads_it_with_its_scaling(merged: Path, lora_run: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(plain(IDS).logits, load(str(lora_run)).model(IDS).logits, rtol=1e-5, atol=1e-5)


def test_the_config_speaks_both_dialects(merged: Path) -> None:
    config = json.loads((merged / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    assert config["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    assert config["rope_theta"] == 500.0
    assert config["max_position_embeddings"] == 64
    # vLLM's and SGLang's rule for the window of a linear model.
    assert config["max_position_embeddings"] * config["rope_scaling"]["factor"] == 128
    assert json.loads((merged / "tokenizer_config.json").read_text())["model_max_length"] == 128
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_dtype_is_written_and_rounds_once(lora_run: Path, merged: Path, tmp_path: Path) -> None:
    half = merge(lora_run, tmp_path / "half", dtype="bfloat16").folder
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    exact = load(str(merged), dtype="float32").model.state_dict()
    for name, weight in load(str(half), dtype="bfloat16").model.state_dict().items():
        assert torch.equal(weight, exact[name].to(torch.bfloat16)), name


def test_what_is_no_adapter_is_refused(full_run: Path, tmp_path: Path) -> None:
    for folder in (full_run, tmp_path):
        with pytest.raises(ModelError, match="holds no adapter"):
            merge(folder, tmp_path / "out")


PROBE = """
import sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__ == sys.argv[3], transformers.__version__
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype=torch.float32)
ids = torch.randint(2, 1024, (2, 128), generator=torch.Generator().manual_seed(5))
with torch.no_grad():
    torch.save(model(ids).logits, sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(tokenizer.model_max_length, *tokenizer(sys.argv[4])["input_ids"])
"""
TEXT = "The pass key is 90817."


@pytest.mark.slow
def test_transformers_4_gives_the_same_logits(merged: Path, lora_run: Path, tmp_path: Path) -> None:
    """transformers 4 reads a config without the old dialect silently unscaled."""
    environment = tmp_path / "old"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    install = ["-m", "pip", "install", "--quiet", f"torch=={torch.__version__.partition('+')[0]}"]
    subprocess.run([python, *install, f"transformers=={OLD_TRANSFORMERS}"], check=True)
    logits = tmp_path / "logits.pt"
    outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [python, "-c", PROBE, str(merged), str(logits), OLD_TRANSFORMERS, TEXT]
    answer = subprocess.run(command, check=True, env=outside, cwd=tmp_path, capture_output=True, text=True)
    expected = load(str(merged)).tokenizer(TEXT)["input_ids"]
    assert [int(number) for number in answer.stdout.split()] == [128, *expected]
    old = torch.load(logits)
    with torch.no_grad():
        torch.testing.assert_close(old, load(str(merged)).model(IDS).logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(old, load(str(lora_run)).model(IDS).logits, rtol=1e-5, atol=1e-5)
