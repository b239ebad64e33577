"""Tuning on an NF4 base, on a CPU."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from conftest import refused, small_recipe, train
from pi_lora.api import load
from pi_lora.errors import ModelError
from pi_lora.models.adapter import prepare_for_tuning
from pi_lora.models.loaded import load_base
from pi_lora.models.resolve import resolve_model
from pi_lora.models.weights import check_finite
from pi_lora.preflight import check
from pi_lora.recipe.schema import Tuning
from random_runs import save_base
from small_configs import SIZES

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("bitsandbytes") is None,
        reason="bitsandbytes is not installed; pip install pi-lora[qlora]",
    ),
]


@pytest.fixture(scope="module")
def qlora_run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(small_recipe(small_model, tuning={"method": "qlora", "rank": 4}), tmp_path_factory.mktemp("q") / "run")


def quantized(folder: Path) -> torch.nn.Module:
    return load_base(resolve_model(str(folder)), torch.bfloat16, placement="quantized")


@torch.no_grad()
def test_trained_weights_are_float32_and_activations_bfloat16(small_model: Path) -> None:
    tuned = prepare_for_tuning(quantized(small_model), Tuning(method="qlora", rank=4), str(small_model))
    trained = {name: weight for name, weight in tuned.named_parameters() if weight.requires_grad}
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert any("embed_tokens" in name for name in trained)
    seen = []
    tuned.get_base_model().model.layers[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    tuned(torch.arange(2, 40)[None])
    assert seen == [torch.bfloat16]


def test_weights_take_four_bits_and_their_scales_eight(small_model: Path) -> None:
    """NF4 with double quantization, as plans count it."""
    state = quantized(small_model).model.layers[0].mlp.up_proj.weight.quant_state
    assert (state.quant_type, state.nested, state.dtype) == ("nf4", True, torch.bfloat16)
    assert state.absmax.dtype == torch.uint8


@pytest.mark.parametrize("size", [48, 128], ids=["sizes that cannot be repacked", "sizes that can"])
def test_a_measurement_leaves_weights_and_gradients_as_they_are(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bitsandbytes finds AVX512-BF16 it repacks NF4 weights in evaluation mode, and loses the gradients."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    sizes = {"vocab_size": 1024, "hidden_size": size, "intermediate_size": 2 * size}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    base = save_base(LlamaConfig(**sizes, **layers), tmp_path / "base", torch.bfloat16)
    tuned = prepare_for_tuning(quantized(base), Tuning(method="qlora", rank=4), str(base))
    ids = torch.arange(2, 40)[None]
    weights, gradients = [], []
    for _ in range(2):
        tuned.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append([weight.grad for weight in tuned.parameters() if weight.requires_grad])
        tuned.zero_grad()
        with torch.no_grad():
            assert tuned.eval()(ids).logits.isfinite().all()
        weights.append({name: tensor.clone() for name, tensor in tuned.state_dict().items()})
    assert all(map(torch.equal, *gradients))
    fresh = quantized(base).state_dict()
    stored = [name for name in fresh if "proj.weight" in name]
    assert any("nested_absmax" in name for name in stored)
    for name in stored:
        inside = "base_model.model." + name.replace(".weight", ".base_layer.weight", 1)
        assert all(torch.equal(each[inside], fresh[name]) for each in weights), name


def test_a_qlora_run_loads_as_it_was_trained(qlora_run: Path, small_model: Path) -> None:
    saved = load_file(qlora_run / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert max(tensor.abs().max() for name, tensor in saved.items() if "lora_B" in name) > 0
    loaded = load(str(qlora_run))
    assert loaded.scale == 2
    assert loaded.module.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.quant_type == "nf4"
    log = [json.loads(line) for line in (qlora_run / "training.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"]


def test_small_updates_of_qlora_are_not_rounded_away(small_model: Path, tmp_path: Path) -> None:
    """At a rate of 1e-6 a bfloat16 embedding of size one would not move at all."""
    training = {**small_recipe(small_model).training.model_dump(), "learning_rate": 1e-6, "warmup_steps": 0}
    recipe = small_recipe(small_model, tuning={"method": "qlora", "rank": 4}, training=training)
    saved = load_file(train(recipe, tmp_path / "run") / "adapter_model.safetensors")
    base = load_file(small_model / "model.safetensors")
    norm = next(tensor for name, tensor in saved.items() if name.endswith("model.norm.weight"))
    moved = (norm - base["model.norm.weight"].to(torch.bfloat16).float()).abs()
    assert 0 < moved.max() < 1e-5


@pytest.mark.parametrize("options", [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}])
def test_a_base_that_bitsandbytes_quantized_is_tuned_and_measured(options: dict[str, Any], tmp_path: Path) -> None:
    """Without double quantization, the scales of a 4-bit weight have no mean. Old configs of 8 bits name no kind."""
    plain = save_base(LlamaConfig(**{**SIZES, "hidden_size": 128}, tie_word_embeddings=True), tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=BitsAndBytesConfig(**options))
    base = Path(shutil.copytree(plain, tmp_path / "base"))
    model.save_pretrained(base)
    if "load_in_8bit" in options:
        config = json.loads((base / "config.json").read_text())
        del config["quantization_config"]["quant_method"]
        (base / "config.json").write_text(json.dumps(config))
    assert load(str(base)).window == 64
    with refused(ModelError, str(base), "bitsandbytes", "tuning.method: full"):
        check(small_recipe(base, tuning={"method": "full"}), tmp_path / "run")
    assert load(str(train(small_recipe(base), tmp_path / "run"))).window == 128


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_qlora_computes_from_nf4_that_is_stored_as_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """As FSDP needs it. The weights are bytes whatever the dtype in which the model computes."""
    plain = save_base(LlamaConfig(**{**SIZES, "hidden_size": 128}), tmp_path / "plain")
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=dtype)
    base = Path(shutil.copytree(plain, tmp_path / "base"))
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=options).save_pretrained(base)
    for compute_dtype in (torch.bfloat16, torch.float32):
        module = load_base(resolve_model(str(base)), compute_dtype, placement="quantized")
        assert module.model.layers[0].self_attn.q_proj.weight.dtype == dtype


def test_infinite_scales_of_single_quantization_are_refused(tmp_path: Path) -> None:
    plain = save_base(LlamaConfig(**{**SIZES, "hidden_size": 128}), tmp_path / "base")
    single = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=single)
    check_finite("base", model.named_parameters())
    model.model.layers[1].self_attn.q_proj.weight.quant_state.absmax[3] = torch.inf
    with refused(ModelError, "base: model.layers.1.", "q_proj.weight"):
        check_finite("base", model.named_parameters())
