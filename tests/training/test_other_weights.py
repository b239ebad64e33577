"""Full tuning writes the weights that the class of a model does not load, and writes none twice."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from architectures import small_config
from conftest import small_recipe, train
from pi_lora.api import load
from random_runs import save_base, stored

HEAD = "mtp.fc.weight"


def base_of(kind: str, folder: Path) -> Path:
    config: Any = small_config(kind)
    config.vocab_size = 1024
    return save_base(config, folder)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """As published: with a head that predicts several tokens, which transformers ignores."""
    base = base_of("qwen3_next", tmp_path / "base")
    save_file({**stored(base), HEAD: torch.randn(3, 5)}, base / "model.safetensors", {"format": "pt"})
    return base


def test_full_tuning_keeps_heads_that_predict_several_tokens(base: Path, tmp_path: Path) -> None:
    run = train(small_recipe(base, tuning={"method": "full"}), tmp_path / "run")
    after = stored(run)
    before = stored(base)
    assert after.keys() == before.keys()
    assert {name for name in before if torch.equal(before[name].float(), after[name].float())} == {HEAD}
    assert load(str(run)).window == 128


def test_full_tuning_of_experts_writes_what_trained(tmp_path: Path) -> None:
    """The files of the base have a tensor for each expert, the model has stacks."""
    base = base_of("qwen3_moe", tmp_path / "base")
    run = train(small_recipe(base, tuning={"method": "full"}), tmp_path / "run")
    assert [file.name for file in run.glob("*.safetensors")] == ["model.safetensors"]
    expert = "model.layers.0.mlp.experts.gate_up_proj"
    before, after = (AutoModelForCausalLM.from_pretrained(folder).get_parameter(expert) for folder in (base, run))
    assert not torch.equal(before, after)
