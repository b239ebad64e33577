import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import small_recipe, train
from transformers import AutoModelForCausalLM

from pi_lora.errors import ModelError
from pi_lora.evaluation.measurement import Session
from pi_lora.evaluation.passkey import Passkey
from pi_lora.evaluation.perplexity import Perplexity
from pi_lora.merging.merging import merge
from pi_lora.models.model import Extension, load
from pi_lora.recipe.evaluation import PasskeyOptions, PerplexityOptions

IDS = torch.randint(2, 1024, (2, 128), generator=torch.Generator().manual_seed(5))


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


def test_a_base_with_llama3_rope_is_tuned_merged_and_measured(small_model: Path, tmp_path: Path) -> None:
    """It goes on from its own frequencies: its factor is multiplied, from the config to the measured scores."""
    base = Path(shutil.copytree(small_model, tmp_path / "base"))
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 32}
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"] = {**rope, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    (base / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text("The door is open and the road is long. " * 60)
    run = train(small_recipe(base, context={"target": 256}, scaling="llama3"), tmp_path / "run")
    full = load(str(merge(run, tmp_path / "merged").folder))
    assert full.config["rope_parameters"]["factor"] == 8.0
    assert full.config["rope_parameters"]["original_max_position_embeddings"] == 32
    # The band between wavelengths of 8 and 32 tokens is divided in part, longer waves by 8, shorter ones not at all.
    plain = 500.0 ** -(torch.arange(0, 16, 2) / 16)
    smooth = ((32 * plain / (2 * math.pi) - 1.0) / 3.0).clamp(0, 1)
    torch.testing.assert_close(full.model.model.rotary_emb.inv_freq, (1 - smooth) * plain / 8 + smooth * plain)
    options = PerplexityOptions(data=str(tmp_path / "text.txt"), windows=(64, 256), stride=64)
    of_run, of_merged, of_base = (
        Perplexity().run(model, options, Session()).windows
        for model in (load(str(run)), full, load(str(base), Extension(256, scaling="llama3")))
    )
    for ours, theirs, untuned in zip(of_run, of_merged, of_base, strict=True):
        assert ours.perplexity == pytest.approx(theirs.perplexity, rel=1e-5)
        assert ours.perplexity < untuned.perplexity
    assert Passkey().run(full, PasskeyOptions(depths=2, trials=1), Session()).target == 256


def test_what_is_no_adapter_is_refused(full_run: Path, tmp_path: Path) -> None:
    for folder in (full_run, tmp_path):
        with pytest.raises(ModelError, match="holds no adapter"):
            merge(folder, tmp_path / "out")


PROBE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype=torch.float32)
ids = torch.randint(2, 1024, (2, 128), generator=torch.Generator().manual_seed(5))
with torch.no_grad():
    torch.save(model(ids).logits, sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(tokenizer.model_max_length, *tokenizer(sys.argv[3])["input_ids"])
"""
TEXT = "The pass key is 90817."


@pytest.mark.slow
def test_transformers_4_gives_the_same_logits(
    in_transformers_4: Callable[..., str], merged: Path, lora_run: Path, tmp_path: Path
) -> None:
    """transformers 4 reads a config without the old dialect silently unscaled."""
    logits = tmp_path / "logits.pt"
    answer = in_transformers_4(PROBE, merged, logits, TEXT)
    expected = load(str(merged)).tokenizer(TEXT)["input_ids"]
    assert [int(number) for number in answer.split()] == [128, *expected]
    old = torch.load(logits)
    with torch.no_grad():
        torch.testing.assert_close(old, load(str(merged)).model(IDS).logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(old, load(str(lora_run)).model(IDS).logits, rtol=1e-5, atol=1e-5)
