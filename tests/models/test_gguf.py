"""GGUF files as bases: the same numbers as the weights in them, with their scaling, or refused."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from adapters import save_base
from conftest import small_recipe, train
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from pi_lora import cli
from pi_lora.errors import ModelError
from pi_lora.merging.merging import merge
from pi_lora.models.base import find_base, load_model
from pi_lora.models.load import Stretch, load
from pi_lora.models.stored import read_adapter_settings, read_config
from pi_lora.preflight import check, plan_here
from pi_lora.recipe.places import cache_folder

IDS = torch.randint(2, 1024, (1, 96), generator=torch.Generator().manual_seed(3))
TEXT = "Chapter 12\n\n34 doors:  567 rooms, it's 8 o'clock.\n\n\n9 \t 10"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaMA whose rows are blocks of 32, with fewer key heads than query heads, window 64."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = LlamaConfig(**sizes, **heads, rope_parameters=rope, max_position_embeddings=64, initializer_range=0.2)
    return save_base(config, tmp_path_factory.mktemp("llama"))


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


@pytest.mark.parametrize(
    ("kind", "dtype", "loss"),
    [
        ("F32", torch.float32, 0),
        ("F16", torch.float16, 1e-2),
        ("Q8_0", torch.bfloat16, 0.1),
        ("Q4_0", torch.bfloat16, 0.9),
    ],
)
@torch.no_grad()
def test_a_file_is_the_model_that_was_written(
    kind: str, dtype: torch.dtype, loss: float, llama: Path, tmp_path: Path
) -> None:
    """Logits equal those of the quantized weights, to the last bit; those of an unrelated model differ by 1.4."""
    base = find_base(str(write_gguf(llama, tmp_path / "small.gguf", kind)))
    assert not (cache_folder() / "gguf").exists() or not list((cache_folder() / "gguf").glob("*.partial"))
    stored = gguf.GGMLQuantizationType[kind]
    rounded = tmp_path / "rounded"
    shutil.copytree(llama, rounded)
    weights = load_file(llama / "model.safetensors")
    for name, weight in weights.items():
        values = gguf.quants.quantize(weight.numpy(), stored) if weight.dim() > 1 else weight.numpy()
        plain = gguf.quants.dequantize(values, stored) if weight.dim() > 1 else values
        weights[name] = torch.from_numpy(plain).to(dtype).float()
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})

    found = load_model(base, base.config, torch.float32)
    assert read_config(Path(base.path))["dtype"] == str(dtype).removeprefix("torch.")
    torch.testing.assert_close(found(IDS).logits, logits(rounded), rtol=0, atol=0)
    difference = (found(IDS).logits - logits(llama)).square().mean() / logits(llama).square().mean()
    assert difference.sqrt() <= loss
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    assert tokenizer(TEXT)["input_ids"] == AutoTokenizer.from_pretrained(llama)(TEXT)["input_ids"]
    assert tokenizer.eos_token == "</s>"
    keys = ("hidden_size", "num_key_value_heads", "rope_parameters", "max_position_embeddings", "tie_word_embeddings")
    assert {key: base.config.get(key) for key in keys} == {key: find_base(str(llama)).config.get(key) for key in keys}


@torch.no_grad()
def test_a_linear_scaling_is_kept(llama: Path, tmp_path: Path) -> None:
    """transformers 5.23 drops it. llama.cpp takes `context_length` for the window after the scaling."""
    file = write_gguf(llama, tmp_path / "long.gguf", "F32", scaling=("linear", 4.0), window=256)
    extended = load(str(file))
    assert (extended.window, extended.scale) == (256, 4)
    same = load(str(llama), Stretch(256, 64)).model(IDS).logits
    torch.testing.assert_close(extended.model(IDS).logits, same, rtol=0, atol=0)


def test_what_transformers_would_drop_is_refused(llama: Path, tmp_path: Path) -> None:
    def refused(message: str, name: str = "small.gguf", **changes: object) -> None:
        file = write_gguf(llama, tmp_path / name, "F32", **changes)
        with pytest.raises(ModelError, match=message) as caught:
            find_base(str(file)).path  # noqa: B018
        assert str(caught.value).startswith(str(file))
        assert "\n" not in str(caught.value)

    refused("scaled by yarn, which", scaling=("yarn", 4.0))
    refused(r"rope_freqs\.weight scales its positions", extra={"rope_freqs.weight": np.ones(8, np.float32)})
    refused(r"splits text in a way \(other\)", pre="other")
    refused("does not read all of its weights", extra={"blk.0.attn_q.bias": np.ones(64, np.float32)})
    refused("does not read all of its weights", without="model.layers.1.mlp.up_proj.weight")
    assert not list((cache_folder() / "gguf").glob("*.partial"))
    # The model's own tokenizer helps where the file's is not known.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(llama / name, tmp_path / name)
    base = find_base(str(write_gguf(llama, tmp_path / "small.gguf", "F32", pre="other")))
    assert AutoTokenizer.from_pretrained(base.path)(TEXT) == AutoTokenizer.from_pretrained(llama)(TEXT)


def test_a_file_that_is_missing_or_damaged_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="no such file; give the path of a GGUF file"):
        find_base(str(tmp_path / "none.gguf"))
    file = write_gguf(llama, tmp_path / "cut.gguf", "Q8_0")
    whole = file.read_bytes()
    for part in (whole[:-1000], whole[:1000], b"", b"not one"):
        file.write_bytes(part)
        with pytest.raises(ModelError, match="truncated, damaged or not GGUF"):
            find_base(str(file))
    file.write_bytes(whole)
    monkeypatch.setenv("PI_LORA_CACHE", str(file))
    with pytest.raises(ModelError, match=r"cannot be dequantized into .* PI_LORA_CACHE"):
        load(str(file))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs the package gguf; pip install 'pi-lora\[gguf\]'"):
        find_base(str(file))


def test_a_file_is_tuned_measured_and_merged_like_any_base(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    file = write_gguf(llama, tmp_path / "small.gguf", "Q8_0")
    training = {**small_recipe(file).training.model_dump(), "save_every": 2}
    job = check(small_recipe(file, training=training), tmp_path / "run")
    plan = plan_here(job)
    assert plan is not None
    assert plan.fits
    assert not (tmp_path / "cache" / "gguf").exists(), "neither a check nor a plan dequantizes"

    run = train(small_recipe(file, training=training), tmp_path / "run")
    folders = [path for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir()]
    assert read_adapter_settings(run).base_model_name_or_path == str(file)
    merged = merge(run, tmp_path / "merged", dtype="float32")
    with torch.no_grad():
        tuned = load(str(run)).model(IDS).logits
    torch.testing.assert_close(logits(merged), tuned, rtol=1e-4, atol=1e-4)
    assert not cli.app(["eval", "perplexity", str(file), "--windows", "64", "--documents", "1"], standalone_mode=False)
    assert [path for path in (tmp_path / "cache" / "gguf").iterdir() if path.is_dir()] == folders, "made once"
    modified = (folders[0] / "model.safetensors").stat().st_mtime_ns
    load(str(file))
    assert (folders[0] / "model.safetensors").stat().st_mtime_ns == modified
