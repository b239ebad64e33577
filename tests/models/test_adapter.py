"""What of a model trains, what an adapter folder holds, and who may load it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from architectures import small_config
from conftest import refused
from pi_lora.api import load
from pi_lora.errors import ModelError, RecipeError
from pi_lora.models.adapter import (
    disable_input_dtype_casting,
    load_adapter,
    prepare_for_tuning,
    save_adapter,
    without_known_warnings,
)
from pi_lora.models.shape import shape_of
from pi_lora.planning.flops import trained_parameters
from pi_lora.recipe.schema import Tuning


def plain(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder)


def adapted(folder: Path, **tuning: object) -> torch.nn.Module:
    return prepare_for_tuning(plain(folder), Tuning.model_validate(tuning), str(folder))


def trained_names(model: torch.nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


NORMS = {"input_layernorm", "norm", "post_attention_layernorm"}


def test_all_linear_leaves_out_projections_inside_a_kernel_of_mamba() -> None:
    model = AutoModelForCausalLM.from_config(small_config("falcon_h1"))
    lora = {name for name in trained_names(prepare_for_tuning(model, Tuning(rank=4), "small")) if "lora_" in name}
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in lora}
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert modules == {*projections, "in_proj"}


@pytest.mark.parametrize(
    ("tuning", "adapted_modules", "whole"),
    [
        (
            {"target_modules": "attention", "modules_to_save": "nothing"},
            {"q_proj", "k_proj", "v_proj", "o_proj"},
            set(),
        ),
        ({"target_modules": ["q_proj", "v_proj"], "modules_to_save": "norms"}, {"q_proj", "v_proj"}, NORMS),
        ({"target_modules": ["down_proj"]}, {"down_proj"}, {*NORMS, "embed_tokens"}),
    ],
)
def test_exactly_the_named_modules_train(
    small_model: Path, tuning: dict[str, Any], adapted_modules: set[str], whole: set[str]
) -> None:
    model = adapted(small_model, **tuning)
    lora = {name for name in trained_names(model) if "lora_" in name}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in lora} == adapted_modules
    others = {name.split(".modules_to_save")[0].rpartition(".")[2] for name in trained_names(model) - lora}
    assert whole <= others <= whole | {"lm_head"}
    shape = shape_of(plain(small_model))
    planned = trained_parameters(shape, Tuning.model_validate(tuning))
    assert planned == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    with refused(RecipeError, "tuning.target_modules: q_prog", "all-linear, attention", "q_proj"):
        trained_parameters(shape, Tuning(target_modules=("q_prog",)))


@pytest.mark.parametrize("kind", ["gemma4_text", "longcat_flash"])
def test_norms_without_weights_and_with_numbers_for_names_are_told_apart(kind: str) -> None:
    model = AutoModelForCausalLM.from_config(small_config(kind))
    norms = {name for name, module in model.named_modules() if "Norm" in type(module).__name__}
    weights = {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in norms}
    tuned = prepare_for_tuning(model, Tuning(rank=2), "base")
    trained = {name.removeprefix("base_model.model.") for name in trained_names(tuned)}
    assert weights == {name.replace("modules_to_save.default.", "") for name in trained if "norm" in name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_needs_no_casts_by_peft(small_model: Path, dtype: torch.dtype) -> None:
    """The same loss and gradients to the last bit."""
    model = prepare_for_tuning(plain(small_model).to(dtype), Tuning(rank=4), str(small_model)).train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    ids = torch.arange(2, 60)[None]
    found = []
    for enabled in (True, False):
        model.zero_grad()
        with disable_input_dtype_casting(model, not enabled):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
        found.append({"loss": loss.detach(), **gradients})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert all(module.cast_input_dtype_enabled for module in model.modules() if isinstance(module, BaseTunerLayer))


@torch.no_grad()
def test_an_adapter_file_holds_exactly_the_trained_weights(small_model: Path, tmp_path: Path) -> None:
    model = adapted(small_model, rank=4)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weight.add_(torch.full_like(weight, 0.05) if "lora" in name else 0.1)
    ids = torch.arange(2, 60)[None]
    expected = model.eval()(ids).logits
    save_adapter(model, tmp_path)
    again = load_adapter(plain(small_model), tmp_path)
    torch.testing.assert_close(again(ids).logits, expected, rtol=0, atol=0)
    assert (again(ids).logits - plain(small_model)(ids).logits).abs().max() > 0.1


def test_a_trained_weight_that_is_not_saved_is_an_error(small_model: Path, tmp_path: Path) -> None:
    model = adapted(small_model, rank=4, modules_to_save="nothing")
    # The trap that others fell into: PEFT saves nothing of what is unfrozen by hand.
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with refused(ModelError, str(tmp_path), "not saved", "norm.weight"):
        save_adapter(model, tmp_path)


def test_an_adapter_that_lacks_a_tensor_is_refused(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "less"
    shutil.copytree(lora_run, folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    dropped = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != dropped}, file)
    with pytest.raises(ModelError, match="lacks"):
        load_adapter(plain(small_model), folder)


def test_a_pickled_adapter_is_refused(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    """PEFT would read it."""
    folder = Path(shutil.copytree(lora_run, tmp_path / "pickled"))
    file = folder / "adapter_model.safetensors"
    torch.save(load_file(file), folder / "adapter_model.bin")
    file.unlink()
    with refused(ModelError, str(file), "safetensors"):
        load_adapter(plain(small_model), folder)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing` is deprecated:FutureWarning")
@torch.no_grad()
def test_other_loaders_that_drop_the_scaling_fail_or_warn(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    """Only a base that the user has loaded under its own config cannot be told from the right one: PEFT warns of it."""
    advice = r"needs the config\.json .* pi_lora\.load, or merge it"
    with without_known_warnings(), pytest.raises(ValueError, match="wants to import 'pi_lora'"):
        AutoPeftModelForCausalLM.from_pretrained(str(lora_run))
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(lora_run)
    # From the hub, transformers 5 takes the base's config; transformers 4 does so from a folder too.
    downloaded = shutil.copytree(lora_run, tmp_path / "downloaded", ignore=shutil.ignore_patterns("config.json"))
    with pytest.warns(match=advice):
        AutoModelForCausalLM.from_pretrained(downloaded)
    unscaled = AutoModelForCausalLM.from_pretrained(small_model)
    with pytest.warns(match=advice):
        PeftModel.from_pretrained(unscaled, lora_run)
    config = AutoConfig.from_pretrained(lora_run)
    with without_known_warnings():
        by_hand = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_model, config=config), lora_run)
    ids = torch.arange(2, 120)[None]
    torch.testing.assert_close(by_hand.eval()(ids).logits, load(str(lora_run)).module(ids).logits, rtol=1e-5, atol=1e-5)
