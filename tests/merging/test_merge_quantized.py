"""An adapter of QLoRA is added to the base as it is stored."""

import importlib.util
from pathlib import Path

import pytest
import torch
from conftest import small_recipe, train
from random_runs import save_base, tuned
from safetensors.torch import load_file
from test_merge_peft import TIED

from pi_lora.merging.merging import merge

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
