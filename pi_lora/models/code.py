"""The Python code that a model brings: run with the user's permission, and written with the config of the model."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

# The classes that engines ask for. Tokenizers name theirs in their own settings.
MODEL = "AutoModelForCausalLM"
KEYS = ("AutoConfig", "AutoModel", MODEL)


def path_for_code(name: str, folder: Path, commit: str | None) -> str:
    """Return the name by which transformers reads the code of a model: of a hub id with a commit not the folder, from
    where it would take code that `auto_map` names by the hub id at the newest commit.
    """
    return name if commit else str(folder)


def load_classes(auto_map: dict[str, str], path: str, revision: str | None) -> dict[str, Any]:
    """Load the classes that the `auto_map` of a model names, from its files at `revision`."""
    classes = {}
    for key in KEYS:
        if key in auto_map:
            classes[key] = get_class_from_dynamic_module(auto_map[key], path, revision=revision)
    return classes


def register(model: Any, config_class: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Let transformers build `model` wherever it gets a config of the class that is returned. By itself it would load
    the newest code there.

    The class is a new one: another model, with other code or none, may have `config_class`.
    """
    kept = {"__init__": config_class.__init__, "__module__": config_class.__module__}
    own_class = type(config_class.__name__, (config_class,), kept)
    AutoModelForCausalLM.register(own_class, add_generation_mixin_to_remote_model(model), exist_ok=True)
    return own_class


def name_of(kind: type) -> str:
    """Return the name of a class in an `auto_map` beside its module."""
    module = kind.__module__.rpartition(".")[2]
    return f"{module}.{kind.__name__}"
