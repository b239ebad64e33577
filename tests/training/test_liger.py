"""Liger's kernels: a module of that name stands in for the package, whose kernels need a GPU."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import small_recipe
from transformers import PreTrainedModel

from pi_lora.errors import ModelError, RecipeError
from pi_lora.preflight import check
from pi_lora.recipe.schema import Recipe

Called = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """What a package that knows LLaMA alone is asked for; it computes MLPs as `silu(gate) * up`, as Liger's do."""
    found: Called = []

    def apply(model: PreTrainedModel, **kernels: bool) -> None:
        found.append((type(model).__name__, kernels))
        for layer in model.model.layers:
            layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.down_proj(
                torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
            )

    patches = ModuleType("liger_kernel.transformers.monkey_patch")
    vars(patches).update(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": apply}, _apply_liger_kernel_to_instance=apply)
    for module in (ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers"), patches):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def recipe(model: Path, kernels: str = "liger", **changes: Any) -> Recipe:
    return small_recipe(model, model={"name": str(model), "kernels": kernels}, **changes)


def test_a_model_without_kernels_is_refused(
    small_model: Path, tmp_path: Path, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pi_lora.preflight._hardware_problems", lambda recipe: [])
    monkeypatch.setattr(sys.modules["liger_kernel.transformers.monkey_patch"], "MODEL_TYPE_TO_APPLY_LIGER_FN", {})
    with pytest.raises(ModelError, match="liger has none for models of type llama; leave the key out"):
        check(recipe(small_model), tmp_path / "run")


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_it_needs_a_gpu_and_the_package(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RecipeError) as raised:
        check(recipe(small_model), tmp_path / "run")
    assert raised.value.problems == (
        "model.kernels: liger needs a GPU; leave it out",
        "model.kernels: liger: needs the package liger_kernel; pip install 'pi-lora[liger]'",
    )


def test_the_package_itself_has_what_is_called() -> None:
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="pip install pi-lora[liger]")
    assert {"llama", "mistral", "qwen3"} < set(patches.MODEL_TYPE_TO_APPLY_LIGER_FN)
