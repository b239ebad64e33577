"""A merge computes what base + adapter do, for runs and adapters from elsewhere, with configs and files for engines."""

import json
import math
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import extend, refused
from pi_lora.api import load, merge
from pi_lora.errors import ModelError
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.models.weights import StoredTensor
from pi_lora.scaling.extension import Extension
from random_runs import save_base, save_run, stored, tuned
from small_configs import ATTENTION, llama

IDS = torch.randint(2, 1024, (2, 128), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def merged(lora_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge(lora_run, tmp_path_factory.mktemp("merged") / "model").folder


@torch.no_grad()
def test_merged_logits_equal_the_runs(merged: Path, lora_run: Path, small_model: Path) -> None:
    run, full = load(str(lora_run)), load(str(merged))
    assert (full.scale, full.window) == (run.scale, run.window) == (2, 128)
    expected = run.module(IDS).logits
    for model in (full.module, AutoModelForCausalLM.from_pretrained(merged)):
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    assert (expected - load(str(small_model)).module(IDS).logits).abs().max() > 0.1


def test_the_merged_config_has_both_dialects_of_rope(merged: Path) -> None:
    config = json.loads((merged / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    assert config["rope_scaling"] == {"type": "linear", **config["rope_parameters"]}
    # vLLM's and SGLang's rule for the window of a linear model multiplies it by the factor.
    assert config["max_position_embeddings"] == 64
    assert json.loads((merged / "tokenizer_config.json").read_text())["model_max_length"] == 128


def test_a_merge_keeps_llama3_frequencies_of_the_base(small_model: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(small_model, tmp_path / "base"))
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 32}
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"] = {**rope, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    (base / "config.json").write_text(json.dumps(config))
    run = save_run(base, tmp_path / "run", Extension(256, scaling="llama3"), r=4, target_modules=ATTENTION)
    full = load(str(merge(run, tmp_path / "merged").folder))
    assert full.source.config["rope_parameters"]["factor"] == 8.0
    assert full.source.config["rope_parameters"]["original_max_position_embeddings"] == 32
    # The band between wavelengths of 8 and 32 tokens is divided in part, longer waves by 8, shorter ones not at all.
    plain = 500.0 ** -(torch.arange(0, 16, 2) / 16)
    smooth = ((32 * plain / (2 * math.pi) - 1.0) / 3.0).clamp(0, 1)
    torch.testing.assert_close(full.module.model.rotary_emb.inv_freq, (1 - smooth) * plain / 8 + smooth * plain)
    with torch.no_grad():
        torch.testing.assert_close(full.module(IDS).logits, load(str(run)).module(IDS).logits, rtol=1e-4, atol=1e-4)


def test_merging_a_folder_without_an_adapter_is_refused(small_model: Path, tmp_path: Path) -> None:
    for folder, name in ((small_model, "adapter"), (tmp_path, "config.json")):
        with refused(ModelError, f"{folder}: ", name):
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
        torch.testing.assert_close(old, load(str(merged)).module(IDS).logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(old, load(str(lora_run)).module(IDS).logits, rtol=1e-5, atol=1e-5)


INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on the attention of a bfloat16 base in three files."""
    folder = tmp_path_factory.mktemp("sharded")
    base = save_base(llama(), folder / "base", torch.bfloat16, max_shard_size="80KB")
    return save_run(base, folder / "run", r=4, target_modules=ATTENTION)


def test_merged_weights_have_the_shards_of_the_base(sharded: Path, tmp_path: Path) -> None:
    base = sharded.parent / "base"
    merged = merge(sharded, tmp_path / "merged", check="none").folder
    index = json.loads((merged / INDEX).read_text())
    before, after = stored(base), stored(merged)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.rsplit(".", 2)[-2] in ATTENTION}
    assert len({*index["weight_map"].values()}) == 3
    assert index["weight_map"] == json.loads((base / INDEX).read_text())["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    assert {stat.S_IMODE(path.stat().st_mode) for path in merged.iterdir()} == {0o644}


def test_stored_frequencies_are_dropped_and_integer_tensors_kept(sharded: Path, tmp_path: Path) -> None:
    """The first LLaMA's files have the frequencies of the unscaled rope beside the weights."""
    tensors = stored(sharded.parent / "base")
    path = tmp_path / "base"
    path.mkdir()
    (path / "config.json").write_bytes((sharded.parent / "base" / "config.json").read_bytes())
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "steps": torch.tensor(7)}
    save_file({**tensors, **extra}, path / "model.safetensors")
    merged = stored(merge(ModelRef(sharded, base=str(path)), tmp_path / "merged", check="none").folder)
    assert merged.keys() - tensors.keys() == {"steps"}
    assert merged["steps"] == 7


def test_a_merge_reads_at_most_one_block_at_a_time(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    rows = StoredTensor.rows

    def noted(tensor: StoredTensor, start: int, stop: int) -> torch.Tensor:
        block = rows(tensor, start, stop)
        read.append((tensor.name, block.numel()))
        return block

    monkeypatch.setattr("pi_lora.models.weights.BLOCK", 200)
    monkeypatch.setattr(StoredTensor, "rows", noted)
    merge(sharded, tmp_path / "merged", check="none")
    assert max(numbers for name, numbers in read if "lora_" not in name) <= 200
    assert len(read) > 400


@pytest.fixture
def adapter(small_model: Path, tmp_path: Path) -> Path:
    """As TRL, axolotl and Unsloth may leave it: without config and tokenizer, and with no name of its base."""
    folder = save_run(small_model, tmp_path / "adapter", r=4, target_modules=["q_proj", "v_proj"])
    settings = folder / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "base_model_name_or_path": None}))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return folder


def test_an_adapter_made_elsewhere_needs_a_config_and_a_base(small_model: Path, adapter: Path, tmp_path: Path) -> None:
    with refused(ModelError, f"{adapter / 'config.json'}: ", "extend"):
        merge(ModelRef(adapter, base=str(small_model)), tmp_path / "merged")
    extend(resolve_model(ModelRef(str(small_model), extension=Extension(128))), tmp_path / "extended")
    shutil.copyfile(tmp_path / "extended" / "config.json", adapter / "config.json")
    with refused(ModelError, f"{adapter / 'adapter_config.json'}: base_model_name_or_path: ", "base"):
        merge(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    merged = merge(ModelRef(adapter, base=str(small_model)), tmp_path / "merged").folder
    ours, expected = AutoModelForCausalLM.from_pretrained(merged), tuned(small_model, adapter)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, expected(IDS).logits, rtol=1e-4, atol=1e-4)
    assert "positions are divided by 2" in (merged / "README.md").read_text()


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "falcon"])
def test_the_config_of_an_adapter_may_be_that_of_an_old_base(kind: str, tmp_path: Path) -> None:
    """As on the hub: without what transformers completes, and in the names of its version 4."""
    sizes = {"vocab_size": 1024, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    entries: dict[str, Any] = {"max_position_embeddings": 64, "model_type": kind, "torch_dtype": "float32"}
    targets = ["query_key_value"]
    if kind == "falcon":
        entries |= {**sizes, "alibi": False}
    elif kind == "gpt_neox":
        entries |= {**sizes, "intermediate_size": 48, "rotary_pct": 0.25, "rotary_emb_base": 500}
    else:
        entries |= {**sizes, "intermediate_size": 48}
        targets = ["q_proj"]
    base = save_base(AutoConfig.for_model(**entries), tmp_path / "base")
    run = save_run(base, tmp_path / "run", Extension(128, scaling="direct"), r=4, target_modules=targets)
    for folder in (base, run):
        (folder / "config.json").write_text(json.dumps(entries))
    merged = merge(run, tmp_path / "merged").folder
    ours = AutoModelForCausalLM.from_pretrained(merged)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, tuned(base, run)(IDS).logits, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_a_base_that_declares_its_extended_window_keeps_the_window(tmp_path: Path) -> None:
    """As DeepSeek-Coder: its tokenizer reads the same number of tokens as `max_position_embeddings` says."""
    base = save_base(llama(max_position_embeddings=256), tmp_path / "base")
    run = save_run(base, tmp_path / "run", Extension(1024), r=4, target_modules=["q_proj"])
    config = json.loads((base / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    tokenizer = json.loads((base / "tokenizer_config.json").read_text())
    for folder in (base, run):
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "model_max_length": 256}))
    assert resolve_model(str(base)).window == resolve_model(str(run)).window == 256
    merged = resolve_model(str(merge(run, tmp_path / "merged").folder))
    assert (merged.window, merged.scale) == (256, 4)
