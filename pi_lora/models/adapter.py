"""What trains, and adapter folders; the only home of PEFT."""

import json
import math
import shlex
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import peft
import torch
from peft import LoraConfig, PeftModel
from peft.helpers import disable_input_dtype_casting as disable_input_dtype_casting
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.models import files
from pi_lora.models.weights import check_finite
from pi_lora.recipe.schema import Tuning


def prepare_for_tuning(
    model: PreTrainedModel, tuning: Tuning, base_name: str, revision: str = "main"
) -> PreTrainedModel | PeftModel:
    """Make trainable what `tuning` names: every weight, or a float32 LoRA adapter of `base_name` at `revision`."""
    if tuning.method == "full":
        return model.requires_grad_(True)
    # LongLoRA finds plain LoRA (Hu et al. 2021) worse at long context without embeddings and norms trained in full.
    whole = _names_trained_whole(model, tuning)
    names = _attention_names(model) if tuning.target_modules == "attention" else tuning.target_names
    config = LoraConfig(
        r=tuning.rank,
        lora_alpha=tuning.lora_alpha,
        use_rslora=tuning.rank_stabilized,
        lora_dropout=tuning.dropout,
        target_modules="all-linear" if tuning.target_modules == "all-linear" else sorted(names),
        modules_to_save=whole or None,
        ensure_weight_tying=tuning.with_embeddings and model.config.tie_word_embeddings,
        task_type="CAUSAL_LM",
    )
    with without_known_warnings():
        tuned = peft.get_peft_model(model, config)
    tuned.peft_config["default"].base_model_name_or_path = base_name
    tuned.peft_config["default"].revision = revision
    _keep_the_dtype_of_activations(tuned)
    train_in_float32(tuned)
    return tuned


def check_shape(folder: Path, tuning: Tuning, base: PreTrainedModel) -> None:
    """Raise ModelError if `tuning` describes another adapter of `base`, on the meta device, than `folder` has."""
    saved = files.read_adapter_settings(folder)
    stored = files.read_tensors(folder / files.ADAPTER_WEIGHTS_FILE)[1]
    weights = prepare_for_tuning(deepcopy(base), tuning, "").named_parameters(remove_duplicate=False)
    shapes = {_saved_name(name): list(weight.shape) for name, weight in weights if weight.requires_grad}
    same_scale = (saved.lora_alpha, bool(saved.use_rslora)) == (tuning.lora_alpha, tuning.rank_stabilized)
    if not same_scale or shapes != {name: entry.shape for name, entry in stored.items()}:
        raise ModelError(
            f"tuning: describes another adapter than {folder} has, of rank {saved.r} and alpha {saved.lora_alpha:g}; "
            "take over the tuning of its recipe.yaml, or merge it first (pi-lora merge "
            f"{shlex.quote(str(folder))}) and tune its weights"
        )


def train_in_float32(model: nn.Module) -> None:
    """Cast all trainable parameters to float32; bfloat16 would round most updates at a small learning rate to zero.
    PEFT 0.21 does so for LoRA's matrices but copies embeddings and norms in the base's dtype.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@contextmanager
def kept_values(model: nn.Module) -> Iterator[None]:
    """Keep the values of what trains, which TRL 1.16 rounds to bfloat16 if the model is quantized."""
    kept = [(weight, weight.data) for weight in model.parameters() if weight.requires_grad]
    yield
    for weight, values in kept:
        weight.data = values


def keep_ties(model: PeftModel) -> None:
    """Let `tie_weights` tie again what is tied now, since accelerate 1.15 calls it when FSDP2 has taken tied weights
    apart; that of transformers 5.23 fails on the wrappers of PEFT 0.21 (`attribute 'weight' already exists`).
    """
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    tied = [group for group in names.values() if len(group) > 1]

    def tie_weights() -> None:
        for first, *others in tied:
            weight = model.get_parameter(first)
            for owner, _, name in (other.rpartition(".") for other in others):
                setattr(model.get_submodule(owner), name, weight)

    model.tie_weights = tie_weights


def save_adapter(model: PeftModel, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the adapter and check that the trained parameters were saved; `weights` are those gathered from FSDP."""
    # Trained embeddings are in modules_to_save; to decide whether to add them PEFT would ask the hub for the base.
    model.save_pretrained(folder, save_embedding_layers=False, state_dict=weights)
    saved = files.read_tensors(folder / files.ADAPTER_WEIGHTS_FILE)[1].keys()
    trained = {_saved_name(name) for name, weight in model.named_parameters() if weight.requires_grad}
    if missing := sorted(trained - saved):
        raise ModelError(f"{folder}: trained but not saved: {', '.join(missing)}")


def mark_adapter_extended(folder: Path) -> None:
    """Keep others from putting the adapter on its base without the scaling, which its settings cannot say: PEFT's
    `AutoPeftModelForCausalLM` fails for a library that it does not import, and `PeftModel` warns of a key that it does
    not know (see `WARNING`). transformers' `AutoModelForCausalLM` fails because there are no full weights.
    """
    file = folder / files.ADAPTER_CONFIG_FILE
    settings = json.loads(file.read_text(encoding="utf-8"))
    # Without a task PEFT asks the mapping.
    settings |= {"task_type": None, "auto_mapping": {"base_model_class": "load", "parent_library": "pi_lora"}}
    settings[files.WARNING] = True
    file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_full(model: PreTrainedModel, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write all weights and count what was saved; transformers 5 stores some under other names than it computes.
    `weights` are those gathered from FSDP, which has taken tied ones apart.
    """
    if weights is not None:
        weights = {name: weight for name, weight in weights.items() if name not in model.all_tied_weights_keys}
    model.save_pretrained(folder, state_dict=weights)
    entries = (entry for file in folder.glob("*.safetensors") for entry in files.read_tensors(file)[1].values())
    saved = sum(math.prod(entry.shape) for entry in entries)
    if saved != (trained := model.num_parameters(only_trainable=True)):
        raise ModelError(f"{folder}: {trained:,} numbers were trained, but {saved:,} saved")


def load_adapter(model: PreTrainedModel, folder: Path, dropout: float = 0.0, trainable: bool = False) -> PeftModel:
    """Load the adapter in `folder` onto its base, whose scaling the caller has restored, to compute as in training.
    Raises ModelError if it is damaged or does not fit.
    """
    files.read_adapter_settings(folder)  # which refuses other kinds than LoRA
    try:
        with without_known_warnings():
            config = peft.LoraConfig.from_pretrained(str(folder))
            config.task_type, config.lora_dropout = "CAUSAL_LM", dropout
            adapted = PeftModel.from_pretrained(model, str(folder), config=config, is_trainable=trainable)
            _keep_whole_modules_in_float32(adapted, folder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[-1]
        raise ModelError(f"{folder}: the adapter does not fit its base ({reason})") from error
    _keep_the_dtype_of_activations(adapted)
    expected = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    check_finite(str(folder), expected.items())
    if missing := sorted(expected.keys() - files.read_tensors(folder / files.ADAPTER_WEIGHTS_FILE)[1].keys()):
        raise ModelError(f"{folder / files.ADAPTER_WEIGHTS_FILE}: lacks {', '.join(missing)}; tune again")
    return adapted


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Ignore warnings of PEFT 0.21: its name for activation checkpointing, as TRL 1.16's, is deprecated in transformers
    5.23; a checkpoint has no base's config where PEFT looks for it; and our own to users of plain PEFT.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gradient_checkpointing(_kwargs|_enable)?` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", r"Could not find a config file in builtin:", UserWarning)
        warnings.filterwarnings("ignore", rf"Unexpected keyword arguments \['{files.WARNING}'\]", UserWarning)
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
            # In float32, or in what FSDP2 has gathered it in.
            module.register_forward_pre_hook(lambda own, inputs: tuple(each.to(own.weight.dtype) for each in inputs))
        if not isinstance(module.original_module, nn.Linear):
            dtype = next(module.original_module.parameters()).dtype
            module.register_forward_hook(lambda _module, _inputs, output, dtype=dtype: output.to(dtype))


def _trained_whole(model: PeftModel) -> list[ModulesToSaveWrapper]:
    """Return the embeddings, norms and head that train beside LoRA; adapters made elsewhere may have other modules."""
    whole = []
    for module in model.modules():
        own = module.original_module if isinstance(module, ModulesToSaveWrapper) else None
        if isinstance(own, (nn.Embedding, nn.Linear)) or "Norm" in type(own).__name__:
            whole.append(module)
    return whole


def _saved_name(name: str) -> str:
    for internal in (".modules_to_save.default", ".default", ".original_module"):
        name = name.replace(internal, "")
    return name


def _names_trained_whole(model: PreTrainedModel, tuning: Tuning) -> list[str]:
    """Return the last part of the names of the modules that train in full beside LoRA."""
    names, embeddings = [], model.get_input_embeddings()
    for name, module in model.named_modules():
        # The norms of OLMo have no parameters.
        is_norm = "Norm" in type(module).__name__ and any(True for _ in module.parameters())
        if (tuning.with_embeddings and module is embeddings) or (tuning.with_norms and is_norm):
            names.append(name)
    return sorted(_last_parts(names))


def _attention_names(model: nn.Module) -> set[str]:
    """Return the last part of the names of the linear layers in attention, which differ between architectures."""
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return _last_parts(name for name in linear if "attn." in name or "attention." in name)


def _last_parts(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}
