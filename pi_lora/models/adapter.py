"""Trainable parameters, and adapter folders; the only module that uses PEFT."""

import math
import re
import shlex
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig, PeftModel
from peft.helpers import disable_input_dtype_casting as disable_input_dtype_casting
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from pi_lora.errors import ModelError, RecipeError, first_line, last_line
from pi_lora.models import files
from pi_lora.models.composite import adapter_renamings, other_parts
from pi_lora.models.experts import Layout, linear_targets
from pi_lora.models.shape import in_attention
from pi_lora.models.weights import check_finite, read_header
from pi_lora.recipe.schema import Tuning
from pi_lora.storage import read_json, write_json
from pi_lora.types import Json

# What PEFT adds to the names of the parameters that an adapter trains, and leaves out when it saves them.
INTERNAL_PARTS = r"\.modules_to_save\.default|\.default|\.original_module"
# The warnings of PEFT 0.21 that are ignored.
KNOWN_WARNINGS = (
    # Of activation checkpointing, also in TRL 1.16: its name is deprecated in transformers 5.23.
    ".*gradient_checkpointing(_kwargs|_enable)?` is deprecated",
    # PEFT looks for the config of the base in a checkpoint.
    r"Could not find a config file in builtin:",
    # PEFT looks for the parts of a composite that are left out.
    "You have passed exclude_modules=.* but no modules were excluded",
    # PEFT looks among modules for the ranks that it gives to experts, which are parameters.
    r"The following \w+_pattern keys did not match .*: \['\.\*\\\\\.gate_up_proj'\]",
    # Ours, to users of plain PEFT.
    rf"Unexpected keyword arguments \['{files.WARNING}'\]",
)


def prepare_for_tuning(
    model: PreTrainedModel, tuning: Tuning, base_name: str, revision: str = "main"
) -> PreTrainedModel | PeftModel:
    """Make all weights trainable, or a float32 LoRA adapter of `base_name` at `revision`, as `tuning` says."""
    if tuning.method == "full":
        return model.requires_grad_()
    # LongLoRA finds plain LoRA (Hu et al. 2021) worse at long context without embeddings and norms trained in full.
    modules_to_save = _modules_to_save(model, tuning)
    target_modules, target_parameters = _targets(model, tuning)
    config = LoraConfig(
        r=tuning.rank,
        lora_alpha=tuning.lora_alpha,
        use_rslora=tuning.rank_stabilized,
        lora_dropout=tuning.dropout,
        target_modules=target_modules,
        target_parameters=target_parameters or None,
        modules_to_save=modules_to_save or None,
        ensure_weight_tying=tuning.with_embeddings and model.config.tie_word_embeddings,
        task_type="CAUSAL_LM",
    )
    with without_known_warnings():
        tuned = peft.get_peft_model(model, config)
    settings = tuned.peft_config["default"]
    settings.base_model_name_or_path = base_name
    settings.revision = revision
    # For readers that load the whole composite. PEFT would miss these parts here.
    parts = "|".join(map(re.escape, other_parts(model)))
    settings.exclude_modules = rf"({parts})\..*" if parts else None
    _keep_the_dtype_of_activations(tuned)
    train_in_float32(tuned)
    return tuned


def _targets(model: PreTrainedModel, tuning: Tuning) -> tuple[str | list[str], list[str]]:
    """Return what LoRA adapts, as `target_modules` and `target_parameters` of PEFT."""
    if tuning.target_modules == "attention":
        return sorted(_attention_names(model)), []
    if tuning.target_modules != "all-linear":
        return sorted(tuning.target_names), []
    modules, parameters = linear_targets(model)
    if parameters and tuning.dropout:
        raise RecipeError(["tuning.dropout: PEFT has none for experts; set it to 0, or target_modules to attention"])
    return modules, parameters


def check_shape(folder: Path, tuning: Tuning, base: PreTrainedModel) -> None:
    """Raise ModelError if `tuning` describes another adapter of `base`, on the meta device, than `folder` has."""
    settings = files.read_adapter_settings(folder)
    stored = read_header(folder / files.ADAPTER_WEIGHTS_FILE)
    stored_shapes = {name: tensor.shape for name, tensor in stored.items()}
    tuned = _prepare_on_meta(base, tuning)
    described_shapes = {
        _saved_name(name): tuple(weight.shape)
        for name, weight in tuned.named_parameters(remove_duplicate=False)
        if weight.requires_grad
    }
    same_alpha = settings.lora_alpha == tuning.lora_alpha
    same_stabilization = bool(settings.use_rslora) == tuning.rank_stabilized
    if not same_alpha or not same_stabilization or described_shapes != stored_shapes:
        raise ModelError(
            f"tuning: describes another adapter than {folder} has, "
            f"of rank {settings.r} and alpha {settings.lora_alpha:g}; "
            "take over the tuning of its recipe.yaml, or merge it first (pi-lora merge "
            f"{shlex.quote(str(folder))}) and tune its weights"
        )


def check_targets(tuning: Tuning, base: PreTrainedModel) -> None:
    """Raise an error if PEFT cannot adapt `base`, on the meta device, as `tuning` says.

    The same holds if it would not load the adapter again, or no merge could add the adapter to the stored weights.
    """
    try:
        tuned = _prepare_on_meta(base, tuning)
    except ValueError as error:
        raise RecipeError([f"tuning: {first_line(error)}"]) from None
    saved = peft.get_peft_model_state_dict(tuned, save_embedding_layers=False)
    try:
        lost = peft.set_peft_model_state_dict(tuned, saved).unexpected_keys
    except KeyError as error:
        lost = error.args
    if lost:
        raise RecipeError([f"tuning: PEFT would not load {lost[0]} again; name other target_modules"])
    layout = Layout(base)
    for name, module in tuned.named_modules():
        if isinstance(module, LoraLayer):
            module_name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            parameter = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            layout.parts(f"{module_name}.{parameter}")


def _prepare_on_meta(base: PreTrainedModel, tuning: Tuning) -> Any:
    with torch.device("meta"):
        return prepare_for_tuning(deepcopy(base), tuning, "")


def train_in_float32(model: nn.Module) -> None:
    """Cast all trainable parameters to float32; bfloat16 would round most updates at a small learning rate to zero.

    PEFT 0.21 does so for the matrices of LoRA, but copies embeddings and norms in the dtype of the base.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@contextmanager
def kept_values(model: nn.Module) -> Iterator[None]:
    """Keep the values of trainable parameters, which TRL 1.16 rounds to bfloat16 if the model is quantized."""
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    values_before = [weight.data for weight in trainable]
    yield
    for weight, values in zip(trainable, values_before, strict=True):
        weight.data = values


def keep_ties(model: PeftModel) -> None:
    """Replace `tie_weights` of a model by a function that ties the weights that are tied now.

    accelerate 1.15 calls it when FSDP2 has taken tied weights apart; that of transformers 5.23 fails on the wrappers of
    PEFT 0.21 (`attribute 'weight' already exists`).
    """
    names_by_id: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(weight), []).append(name)
    tied_names = [names for names in names_by_id.values() if len(names) > 1]

    def tie_weights() -> None:
        for first, *others in tied_names:
            weight = model.get_parameter(first)
            for other in others:
                module_name, _, attribute = other.rpartition(".")
                setattr(model.get_submodule(module_name), attribute, weight)

    model.tie_weights = tie_weights


def save_adapter(model: PeftModel, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the adapter and check that the trained parameters were saved; `weights` are those gathered from FSDP."""
    # Trained embeddings are in modules_to_save; to decide whether to add them PEFT would ask the hub for the base.
    model.save_pretrained(folder, save_embedding_layers=False, state_dict=weights)
    saved = read_header(folder / files.ADAPTER_WEIGHTS_FILE)
    trained = {_saved_name(name) for name, weight in model.named_parameters() if weight.requires_grad}
    missing = sorted(trained - saved.keys())
    if missing:
        raise ModelError(f"{folder}: trained but not saved: {', '.join(missing)}; please report it")


def mark_adapter_extended(folder: Path) -> None:
    """Change the settings of an adapter so that other tools refuse it or warn: they would load the base unscaled.

    `AutoPeftModelForCausalLM` of PEFT fails for a library that it does not import, and `PeftModel` warns of a key that
    it does not know (see `WARNING`). `AutoModelForCausalLM` of transformers fails because there are no full weights.
    """
    file = folder / files.ADAPTER_CONFIG_FILE
    settings = read_json(file, Json, "")
    # Without a task PEFT takes the class from the mapping.
    settings["task_type"] = None
    settings["auto_mapping"] = {"base_model_class": "load", "parent_library": "pi_lora"}
    settings[files.WARNING] = True
    write_json(file, settings, sort_keys=True)


def save_full(model: PreTrainedModel, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write all weights and compare the count of saved numbers: transformers 5 renames some weights when it saves.

    `weights` are those gathered from FSDP, which has taken tied ones apart.
    """
    if weights is not None:
        tied = model.all_tied_weights_keys
        weights = {name: weight for name, weight in weights.items() if name not in tied}
    model.save_pretrained(folder, state_dict=weights, save_original_format=True)
    saved = 0
    for file in folder.glob("*.safetensors"):
        for tensor in read_header(file).values():
            saved += math.prod(tensor.shape)
    expected = model.num_parameters(only_trainable=True)
    stored_names = model.state_dict()
    for name, buffer in model.named_buffers():
        # Some routers have a bias that is a buffer.
        if name in stored_names:
            expected += buffer.numel()
    if saved != expected:
        raise ModelError(f"{folder}: has {saved:,} numbers instead of the {expected:,} of the model")


def load_adapter(model: PreTrainedModel, folder: Path, *, dropout: float = 0.0, trainable: bool = False) -> PeftModel:
    """Load the adapter in `folder` onto `model`, the scaled base, to compute as in training.

    Raise ModelError if the adapter is damaged or does not fit.
    """
    files.read_adapter_settings(folder)  # raises for other kinds than LoRA
    read_header(folder / files.ADAPTER_WEIGHTS_FILE)  # raises for pickled weights, which PEFT would read
    try:
        with without_known_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            config = peft.LoraConfig.from_pretrained(str(folder))
            config.task_type = "CAUSAL_LM"
            config.lora_dropout = dropout
            renamings = adapter_renamings(model)
            adapted = PeftModel.from_pretrained(
                model, str(folder), config=config, is_trainable=trainable, key_mapping=renamings
            )
            _reload_saved_modules_in_float32(adapted, folder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, UserWarning) as error:
        remedy = "name the base that it was tuned from, with --base MODEL"
        if isinstance(error, OSError | SafetensorError | UserWarning):
            remedy = "download the adapter again, or save it again with PEFT"
        elif "size mismatch" in str(error):
            remedy += f", or correct r in {files.ADAPTER_CONFIG_FILE}"
        raise ModelError(f"{folder}: the adapter does not fit its base ({last_line(error)}); {remedy}") from error
    _keep_the_dtype_of_activations(adapted)
    expected = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    check_finite(str(folder), expected.items())
    return adapted


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Ignore the known warnings of PEFT."""
    with warnings.catch_warnings():
        for message in KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message)
        yield


def _reload_saved_modules_in_float32(model: PeftModel, folder: Path) -> None:
    """Read embeddings, norms and the head again in float32: PEFT 0.21 rounds them to the dtype of the base."""
    wrappers = _saved_module_wrappers(model)
    dtypes = {weight.dtype for wrapper in wrappers for weight in wrapper.modules_to_save.parameters()}
    if dtypes <= {torch.float32}:
        return
    for wrapper in wrappers:
        wrapper.modules_to_save.float()
    weights = peft.load_peft_weights(str(folder), device="cpu")
    peft.set_peft_model_state_dict(model, weights)


def _keep_the_dtype_of_activations(model: PeftModel) -> None:
    """Make float32 embeddings and norms take and return the dtype of the base. Logits stay in float32.

    A float32 residual stream doubles the memory of every saved activation.
    """
    for wrapper in _saved_module_wrappers(model):
        # The RMS norms of transformers take any dtype; torch's modules take the dtype of their weight alone.
        if isinstance(wrapper.original_module, (nn.Linear, nn.LayerNorm)):
            wrapper.register_forward_pre_hook(_cast_inputs)
        if not isinstance(wrapper.original_module, nn.Linear):
            dtype = next(wrapper.original_module.parameters()).dtype
            wrapper.register_forward_hook(partial(_cast_output, dtype=dtype))


def _cast_inputs(wrapper: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Cast inputs to the dtype of the weight: float32, or the dtype in which FSDP2 has gathered it."""
    return tuple(tensor.to(wrapper.weight.dtype) for tensor in inputs)


def _cast_output(_module: nn.Module, _inputs: object, output: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    return output.to(dtype)


def _saved_module_wrappers(model: PeftModel) -> list[ModulesToSaveWrapper]:
    """Return the embeddings, norms and head in `modules_to_save`; adapters made elsewhere may have other modules."""
    wrappers = []
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            original = module.original_module
            if isinstance(original, (nn.Embedding, nn.Linear)) or _is_trainable_norm(original):
                wrappers.append(module)
    return wrappers


def _saved_name(name: str) -> str:
    return re.sub(INTERNAL_PARTS, "", name)


def _modules_to_save(model: PreTrainedModel, tuning: Tuning) -> list[str]:
    """Return the last part of the names of the modules that train in full, in addition to LoRA: the whole names where
    other modules may have the same last names, as in a composite.
    """
    names = []
    embeddings = model.get_input_embeddings()
    for name, module in model.named_modules():
        trains_as_embedding = tuning.with_embeddings and module is embeddings
        trains_as_norm = tuning.with_norms and _is_trainable_norm(module)
        if trains_as_embedding or trains_as_norm:
            names.append(name)
    last_parts = _last_parts(names)
    # A number may be the name of anything.
    if other_parts(model) or any(name.isdigit() for name in last_parts):
        return sorted(names)
    return sorted(last_parts)


def _is_trainable_norm(module: nn.Module) -> bool:
    """Whether a module is a norm with parameters, which the norms of OLMo and some of Gemma 4 have not."""
    parameters = list(module.parameters(recurse=False))
    return "Norm" in type(module).__name__ and bool(parameters)


def _attention_names(model: nn.Module) -> set[str]:
    """Return the last part of the names of the linear layers in attention, which differ between architectures."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and in_attention(name):
            names.append(name)
    return _last_parts(names)


def _last_parts(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}
