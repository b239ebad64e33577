"""What trains, and adapter folders; the only home of PEFT."""

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig, PeftModel
from peft.utils import ModulesToSaveWrapper
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.models.base import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from pi_lora.recipe.schema import Tuning


def prepare_for_tuning(
    model: PreTrainedModel, tuning: Tuning, base_name: str, revision: str = "main"
) -> PreTrainedModel | PeftModel:
    """Make trainable what `tuning` names: every weight, or a float32 LoRA adapter of `base_name` at `revision`."""
    if tuning.method == "full":
        return model.requires_grad_(True)
    # LongLoRA finds plain LoRA (Hu et al. 2021) worse at long context without embeddings and norms trained in full.
    whole = _embedding_and_norm_names(model) if tuning.embeddings_and_norms else None
    config = LoraConfig(
        r=tuning.rank,
        lora_alpha=tuning.lora_alpha,
        use_rslora=tuning.rank_stabilized,
        use_dora=tuning.dora,
        lora_dropout=tuning.dropout,
        target_modules="all-linear" if tuning.targets == "all-linear" else sorted(_attention_names(model)),
        modules_to_save=whole,
        ensure_weight_tying=bool(whole) and model.config.tie_word_embeddings,
        task_type="CAUSAL_LM",
    )
    with without_known_warnings():
        tuned = peft.get_peft_model(model, config)
    tuned.peft_config["default"].base_model_name_or_path = base_name
    tuned.peft_config["default"].revision = revision
    _keep_the_dtype_of_activations(tuned)
    train_in_float32(tuned)
    return tuned


def tune_further(model: PreTrainedModel, folder: Path, tuning: Tuning) -> PeftModel:
    """Load the adapter in `folder` onto its base `model` to train it further; the result is one adapter of that base. A
    second adapter would need both to be loaded, and merging the first into a quantized base would round it.
    """
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.lora_dropout = tuning.dropout
    tuned = _put_on(model, folder, is_trainable=True, config=config)
    on_attention_alone = {name.rpartition(".")[2] for name in config.target_modules} <= _attention_names(model)
    if on_attention_alone != (tuning.targets == "attention"):
        raise _other_shape(folder, {"targets": "attention" if on_attention_alone else "all-linear"})
    train_in_float32(tuned)
    return tuned


def check_shape(folder: Path, tuning: Tuning) -> None:
    """Raise ModelError, with the keys to change, if `tuning` describes another adapter than the one in `folder`."""
    saved = json.loads((folder / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
    pairs = {
        "rank": (saved["r"], tuning.rank),
        "alpha": (saved["lora_alpha"], tuning.lora_alpha),
        "rank_stabilized": (bool(saved.get("use_rslora")), tuning.rank_stabilized),
        "dora": (bool(saved.get("use_dora")), tuning.dora),
        "embeddings_and_norms": (bool(saved.get("modules_to_save")), tuning.embeddings_and_norms),
    }
    if tuning.method == "full":
        why = f"{folder} is an adapter, which tuning.method: full cannot tune"
        raise ModelError(f"model.name: {why}; merge it first (pi-lora merge {folder}), or use lora or qlora")
    if differing := {key: has for key, (has, asked) in pairs.items() if has != asked}:
        raise _other_shape(folder, differing)


def _other_shape(folder: Path, differing: Mapping[str, Any]) -> ModelError:
    settings = " ".join(f"tuning.{key}={str(value).lower()}" for key, value in differing.items())
    other = f"the adapter in {folder} has another shape, which tuning further does not change"
    return ModelError(f"tuning: {other}; set {settings}, or merge it first (pi-lora merge {folder}) and tune a new one")


def train_in_float32(model: nn.Module) -> None:
    """Cast all trainable parameters to float32; bfloat16 would round most updates at a small learning rate to zero.
    PEFT 0.21 does so for LoRA's matrices but copies embeddings and norms in the base's dtype; TRL 1.16 casts the
    adapter of a quantized model to bfloat16.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def trainable_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters; a tied weight counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def save_adapter(model: PeftModel, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the adapter and check that the trained parameters were saved; `weights` are those gathered from FSDP."""
    # Trained embeddings are in modules_to_save; to decide whether to add them PEFT would ask the hub for the base.
    model.save_pretrained(folder, save_embedding_layers=False, state_dict=weights)
    with safe_open(folder / ADAPTER_WEIGHTS_FILE, framework="pt") as file:
        saved = set(file.keys())
    trained = {_saved_name(name) for name, weight in model.named_parameters() if weight.requires_grad}
    tied = {_saved_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    if missing := sorted(trained - saved):
        raise ModelError(f"{folder}: trained but not saved: {', '.join(missing)}")
    if foreign := sorted(saved - tied):
        raise ModelError(f"{folder}: saved but not trained: {', '.join(foreign)}")


def save_full(model: PreTrainedModel, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write all weights and count what was saved; transformers 5 stores some under other names than it computes."""
    model.save_pretrained(folder, state_dict=weights)
    saved = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            saved += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    if saved != (trained := trainable_parameters(model)):
        raise ModelError(f"{folder}: {trained:,} numbers were trained, but {saved:,} saved")


def load_adapter(model: PreTrainedModel, folder: Path, weightless: bool = False) -> PeftModel:
    """Load the adapter in `folder` onto its base, whose scaling the caller has restored, to compute as in training.
    `weightless` says that the base has no values yet, so that PEFT does not copy them.
    """
    return _put_on(model, folder, low_cpu_mem_usage=weightless).eval()


def _put_on(model: PreTrainedModel, folder: Path, **options: Any) -> PeftModel:
    try:
        with without_known_warnings():
            adapted = PeftModel.from_pretrained(model, str(folder), **options)
            _keep_whole_modules_in_float32(adapted, folder)
    except Exception as error:  # peft, safetensors and torch raise their own kinds
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        raise ModelError(f"{folder}: the adapter does not fit its base ({reason})") from error
    _keep_the_dtype_of_activations(adapted)
    expected = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
    with safe_open(folder / ADAPTER_WEIGHTS_FILE, framework="pt") as file:
        if missing := sorted(expected - set(file.keys())):
            raise ModelError(f"{folder / ADAPTER_WEIGHTS_FILE}: lacks {', '.join(missing)}; tune again")
    return adapted


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Ignore two warnings: PEFT 0.21 and TRL 1.16 use a name that transformers 5.23 deprecates for activation
    checkpointing, and at a checkpoint PEFT looks for the base's config, which a built-in model has elsewhere.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*gradient_checkpointing` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Could not find a config file in builtin:", category=UserWarning)
        yield


def _keep_whole_modules_in_float32(model: PeftModel, folder: Path) -> None:
    """Read embeddings, norms and the head again in float32: PEFT 0.21 rounds them to the dtype of the base."""
    wrappers = _trained_whole(model)
    if any(weight.dtype != torch.float32 for wrapper in wrappers for weight in wrapper.modules_to_save.parameters()):
        for wrapper in wrappers:
            wrapper.modules_to_save.float()
        peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(folder), device="cpu"))


def _keep_the_dtype_of_activations(model: PeftModel) -> None:
    """Make float32 embeddings and norms take and return the base's dtype, since a float32 residual stream doubles the
    memory of every saved activation. Logits stay in float32.
    """
    for module in _trained_whole(model):
        # The RMS norms of transformers take any dtype; torch's own modules take only their weight's.
        if isinstance(module.original_module, (nn.Linear, nn.LayerNorm)):
            module.register_forward_pre_hook(lambda _module, inputs: tuple(each.float() for each in inputs))
        if not isinstance(module.original_module, nn.Linear):
            dtype = next(module.original_module.parameters()).dtype
            module.register_forward_hook(lambda _module, _inputs, output, dtype=dtype: output.to(dtype))


def _trained_whole(model: PeftModel) -> list[ModulesToSaveWrapper]:
    """Return the embeddings, norms and head that train beside LoRA; adapters made elsewhere may have other modules."""
    wrappers = (module for module in model.modules() if isinstance(module, ModulesToSaveWrapper))
    kinds = (nn.Embedding, nn.Linear)
    return [
        each
        for each in wrappers
        if isinstance(each.original_module, kinds) or "Norm" in type(each.original_module).__name__
    ]


def _saved_name(name: str) -> str:
    """Return the name that PEFT saves a parameter under."""
    for internal in (".modules_to_save.default", ".default", ".original_module"):
        name = name.replace(internal, "")
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def _embedding_and_norm_names(model: PreTrainedModel) -> list[str]:
    embedding = model.get_input_embeddings()
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        # The norms of OLMo have no parameters.
        if module is embedding or ("Norm" in type(module).__name__ and any(True for _ in module.parameters()))
    }
    return sorted(names)


def _attention_names(model: nn.Module) -> set[str]:
    """Return the last part of the names of the linear layers in attention, which differ between architectures."""
    return {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ("attn." in name or "attention." in name)
    }
