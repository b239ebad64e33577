import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, OlmoConfig

from pi_lora.errors import ModelError
from pi_lora.models.adapter import load_adapter, prepare_for_tuning, save_adapter, trainable_parameters
from pi_lora.recipe.schema import Tuning


def plain(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder)


def adapted(folder: Path, **tuning: object) -> torch.nn.Module:
    return prepare_for_tuning(plain(folder), Tuning.model_validate(tuning), str(folder))


def trained_names(model: torch.nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_full_trains_every_weight(small_model: Path) -> None:
    model = adapted(small_model, method="full")
    assert trainable_parameters(model) == sum(weight.numel() for weight in model.parameters())


def test_lora_trains_matrices_and_with_them_embeddings_and_norms(small_model: Path) -> None:
    alone = trained_names(adapted(small_model, rank=4, embeddings_and_norms=False))
    assert all("lora_" in name for name in alone)
    beside = trained_names(adapted(small_model, rank=4)) - alone
    assert sum("embed_tokens" in name for name in beside) >= 1
    assert sum("layernorm" in name for name in beside) == 4
    assert any(".norm." in name for name in beside)


def test_norms_without_parameters_are_left_alone() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(OlmoConfig(vocab_size=64, pad_token_id=0, **sizes))
    names = trained_names(prepare_for_tuning(model, Tuning(rank=4, embeddings_and_norms=True), "olmo"))
    assert {name.split(".modules_to_save")[0].rpartition(".")[2] for name in names if "lora_" not in name} == {
        "embed_tokens"
    }


def test_attention_targets_leave_the_mlp_alone(small_model: Path) -> None:
    names = trained_names(adapted(small_model, targets="attention", embeddings_and_norms=False))
    assert all("self_attn" in name for name in names)
    assert {name.split("self_attn.")[1].split("_")[0] for name in names} == {"q", "k", "v", "o"}


@torch.no_grad()
def test_what_was_trained_is_what_is_saved(small_model: Path, tmp_path: Path) -> None:
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
    model = adapted(small_model, rank=4, embeddings_and_norms=False)
    # The trap that others fell into: PEFT saves nothing of what is unfrozen by hand.
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ModelError, match=r"trained but not saved: .*norm\.weight"):
        save_adapter(model, tmp_path)


def test_a_damaged_adapter_is_refused(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(lora_run, folder)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ModelError, match="the adapter does not fit its base"):
        load_adapter(plain(small_model), folder)


def test_an_adapter_that_lacks_a_tensor_is_refused(lora_run: Path, small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "less"
    shutil.copytree(lora_run, folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    dropped = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != dropped}, file)
    with pytest.raises(ModelError, match="lacks"):
        load_adapter(plain(small_model), folder)
