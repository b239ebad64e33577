"""An adapter of QLoRA on the 16-bit base, and on the weights that it was trained on."""

import importlib.util
from pathlib import Path

import pytest
import torch
from conftest import small_recipe, train
from random_runs import save_base, tuned
from safetensors.torch import load_file
from test_merge_check import logits_in
from test_merge_peft import TIED

from pi_lora.errors import ModelError
from pi_lora.merging.merging import merge
from pi_lora.models.model import find

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("bitsandbytes") is None,
        reason="bitsandbytes is not installed; pip install pi-lora[qlora]",
    ),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(TIED, tmp_path_factory.mktemp("q") / "base", torch.bfloat16)


@pytest.fixture(scope="module")
def run(base: Path) -> Path:
    recipe = small_recipe(base, tuning={"method": "qlora", "rank": 4, "targets": "attention"})
    return train(recipe, base.parent / "run")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_onto_the_stored_base(base: Path, run: Path, tmp_path: Path) -> None:
    merged = merge(run, tmp_path / "merged").folder
    expected = tuned(base, run).merge_and_unload().state_dict()
    for name, weight in weights(merged).items():
        assert torch.equal(weight, expected[name].to(torch.bfloat16)), name


def test_onto_what_it_was_trained_on(base: Path, run: Path, tmp_path: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit

    result = merge(run, tmp_path / "merged", onto="quantized", check="logits")
    merged, stored = weights(result.folder), weights(base)
    loaded = find(str(base)).load_weights(torch.bfloat16, place="quantized")
    layer = loaded.model.layers[1]
    # The adapter is on attention alone, but every linear layer had been quantized.
    up = layer.mlp.up_proj.weight
    seen = dequantize_4bit(up.data, up.quant_state)
    assert torch.equal(merged["model.layers.1.mlp.up_proj.weight"], seen)
    assert not torch.equal(merged["model.layers.1.mlp.up_proj.weight"], stored["model.layers.1.mlp.up_proj.weight"])

    name = "model.layers.1.self_attn.q_proj"
    adapter = load_file(run / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    query = layer.self_attn.q_proj.weight
    expected = dequantize_4bit(query.data, query.quant_state).float() + 2.0 * b @ a
    torch.testing.assert_close(merged[f"{name}.weight"], expected.bfloat16(), rtol=2**-7, atol=1e-6)
    difference, tuning = logits_in(result.checks[1])
    assert difference < tuning / 2


def test_exactly_what_training_quantizes_is_rounded(base: Path, run: Path, tmp_path: Path) -> None:
    from bitsandbytes.nn import Linear4bit

    loaded = find(str(base)).load_weights(torch.bfloat16, place="quantized")
    rounded = {f"{name}.weight" for name, module in loaded.named_modules() if isinstance(module, Linear4bit)}
    onto_base, onto_quantized = (
        weights(merge(run, tmp_path / onto, onto=onto).folder) for onto in ("base", "quantized")
    )
    assert {name for name, weight in onto_base.items() if not torch.equal(weight, onto_quantized[name])} == rounded


def test_of_a_float16_base_check_and_merge_have_the_weights_of_training(tmp_path: Path) -> None:
    """NF4 of the same weights differs with the dtype that they are read in, as far as the next of its 16 values."""
    base = save_base(TIED, tmp_path / "base", torch.float16)
    tuning = {"method": "qlora", "rank": 4, "targets": "attention"}
    run = train(small_recipe(base, tuning=tuning), tmp_path / "run")
    difference, _ = logits_in(merge(run, tmp_path / "merged", onto="quantized", check="logits").checks[1])
    assert difference < 5e-3


def test_what_was_not_quantized_is_not_put_there(lora_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="was not tuned by qlora; --onto quantized is for adapters that were"):
        merge(lora_run, tmp_path / "merged", onto="quantized")
    assert list(tmp_path.iterdir()) == []
