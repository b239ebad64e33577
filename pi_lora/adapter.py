"""What trains, and adapter folders: the only home of PEFT."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.recipe.schema import Tuning

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"


def prepare_for_tuning(model: PreTrainedModel, tuning: Tuning, base_name: str) -> PreTrainedModel | PeftModel:
    """Make what `tuning` names trainable, and only that: every weight, or a float32 LoRA adapter around `model`."""
    if tuning.method == "full":
        return model.requires_grad_(True)
    with without_known_warnings():
        tuned = get_peft_model(model, lora_config(model, tuning))
    tuned.peft_config["default"].base_model_name_or_path = base_name
    return tuned


def lora_config(model: PreTrainedModel, tuning: Tuning) -> LoraConfig:
    """The LoRA (Hu et al. 2021) that a recipe asks for, with embeddings and norms trained in full beside it if it says
    so (LongLoRA: plain LoRA falls behind without them at long context).
    """
    whole = sorted({*_norm_names(model), _embedding_name(model)}) if tuning.embeddings_and_norms else None
    return LoraConfig(
        r=tuning.rank,
        lora_alpha=tuning.lora_alpha,
        lora_dropout=tuning.dropout,
        target_modules="all-linear" if tuning.targets == "all-linear" else sorted(_attention_names(model)),
        modules_to_save=whole,
        ensure_weight_tying=bool(whole) and model.config.tie_word_embeddings,
        task_type="CAUSAL_LM",
    )


def trainable_parameters(model: nn.Module) -> int:
    """How many numbers train; a tied weight counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter, and check that what was trained is what was saved.

    Raises:
        ModelError: the file lacks a trained tensor, or holds one that was not trained.
    """
    # Trained embeddings are in modules_to_save; PEFT would look the base up on the hub to decide whether to add them.
    model.save_pretrained(folder, save_embedding_layers=False)
    with safe_open(folder / ADAPTER_WEIGHTS_FILE, framework="pt") as file:
        saved = set(file.keys())
    trained = {_saved_name(name) for name, weight in model.named_parameters() if weight.requires_grad}
    tied = {_saved_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    if missing := sorted(trained - saved):
        raise ModelError(f"{folder}: trained but not saved: {', '.join(missing)}")
    if foreign := sorted(saved - tied):
        raise ModelError(f"{folder}: saved but not trained: {', '.join(foreign)}")


def load_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """Put the adapter in `folder` on its base, whose scaling the caller has restored.

    Raises:
        ModelError: the adapter is damaged or belongs to a model of another shape.
    """
    try:
        with without_known_warnings():
            adapted = PeftModel.from_pretrained(model, str(folder))
    except Exception as error:  # peft, safetensors and torch each raise kinds of their own
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"{folder}: the adapter does not fit its base ({reason[-1] if reason else error!r})"
        ) from error
    expected = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    with safe_open(folder / ADAPTER_WEIGHTS_FILE, framework="pt") as file:
        if missing := sorted(expected - set(file.keys())):
            raise ModelError(
                f"{folder / ADAPTER_WEIGHTS_FILE}: lacks {', '.join(missing)}; it is not whole, tune again"
            )
    return adapted.eval()


def merged_weights(model: PeftModel) -> PreTrainedModel:
    """The base with the adapter added in, `W + (alpha / rank) B A`; on float32 weights, so that it rounds once."""
    merged: PreTrainedModel = model.merge_and_unload()
    return merged


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """PEFT 0.21 and TRL 1.16 call activation checkpointing by the name that transformers 5.23 is about to drop; and at
    a checkpoint PEFT looks for the base's config where a built-in model has none.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Could not find a config file in builtin:", category=UserWarning)
        yield


def _saved_name(name: str) -> str:
    """The name that PEFT saves a parameter under."""
    return name.replace(".modules_to_save.default", "").replace(".default", "").replace(".original_module", "")


def _embedding_name(model: PreTrainedModel) -> str:
    embedding = model.get_input_embeddings()
    names: list[str] = [name.rpartition(".")[2] for name, module in model.named_modules() if module is embedding]
    return names[0]


def _norm_names(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if "Norm" in type(module).__name__:
            yield name.rpartition(".")[2]


def _attention_names(model: nn.Module) -> set[str]:
    """The last names of the linear layers inside attention, whatever an architecture calls them."""
    return {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ("attn." in name or "attention." in name)
    }
