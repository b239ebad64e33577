"""The small files of models: their location (a folder, the cache of the hub, or the package), and checked readers.

This module does not import torch.
"""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from huggingface_hub import hf_hub_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import EntryNotFoundError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pi_lora.errors import ModelError, first_line
from pi_lora.scaling.config import Config, language_config, whole_config, with_legacy_rope_keys
from pi_lora.storage import read_json, write_json
from pi_lora.types import Json

CONFIG_FILE = "config.json"
SETTINGS_FILE = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# The vocabulary in other formats than tokenizer.json, which some engines and converters read.
VOCABULARY_FILES = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
TOKENIZER_FILES = (
    SETTINGS_FILE,
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    "chat_template.json",
    *VOCABULARY_FILES,
)
# What composites have beside their tokenizer.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# As PEFT names them.
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
# The ending of the name of the base in the adapters that are released with pi-lora.
EXTENDED = " (extended by pi-lora: load it with pi_lora.load, or merge it)"
# A key in the settings of an adapter of an extended base. `PeftModel.from_pretrained` takes any base and does not scale
# its positions, but PEFT warns of a key that it does not know, with the name of the key, and ignores it.
WARNING = "the base needs the config.json beside this file: load it with pi_lora.load, or merge it"
BUILTIN = "builtin:"
BUILTIN_FOLDER = Path(__file__).parents[1] / "builtin"
REMOTE_CODE = "runs Python code of its own; read that code, and if you trust it give --trust-remote-code"


def locate(name: str) -> str:
    """Return the folder or hub id that `name` means; raise ModelError if it is a folder that does not exist."""
    folder = Path(name).expanduser()
    if name.startswith(BUILTIN):
        folder = BUILTIN_FOLDER / name.removeprefix(BUILTIN)
    elif not is_local(name):
        return name
    if not folder.is_dir():
        raise ModelError(f"{name}: no such model; give a model folder, a hub id or {BUILTIN}tiny")
    return str(folder)


def is_local(name: str) -> bool:
    """Whether a name cannot be a hub id, or is that of a file, a folder or a built-in model."""
    return name.startswith((".", "/", "~", BUILTIN)) or name.count("/") > 1 or Path(name).exists()


def public_name(name: str) -> str:
    """Return a name as strangers may read it: the last part of a path on this machine, and any other name as it is.

    >>> public_name("/home/me/books/*.txt"), public_name("~/base"), public_name("owner/base")
    ('*.txt', 'base', 'owner/base')
    """
    if name.startswith(("/", "~", ".")) or os.path.exists(name):
        return Path(name).name or name
    return name


def find_file(path: str, name: str, revision: str = "main", *, download: bool = True) -> Path | None:
    """Return a file of the folder or hub id `path`, downloaded if necessary, or None if there is none.

    Without `download`, only the cache of the hub is searched.
    """
    if os.path.isdir(path):
        file = Path(path, name)
        return file if file.is_file() else None
    try:
        return Path(hf_hub_download(path, name, revision=revision, local_files_only=not download))
    except EntryNotFoundError:  # or not in the cache, without a network
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {name} cannot be downloaded ({first_line(error)}); check name and network") from None


def find_files(path: str, names: Sequence[str], revision: str = "main") -> dict[str, Path]:
    """Return the files of the folder or hub id `path` that have one of the `names`, by name."""
    found = {name: find_file(path, name, revision) for name in names}
    return {name: file for name, file in found.items() if file}


@contextmanager
def readable(name: str | Path, what: str) -> Iterator[None]:
    """Raise ModelError if transformers cannot read `what` of a model."""
    try:
        yield
    except Exception as error:  # config and tokenizer classes raise exceptions of any kind
        cause = first_line(error)
        if HF_HUB_OFFLINE and not Path(name).exists():
            cause = "no folder here, nor in the cache of the hub, which HF_HUB_OFFLINE=1 forbids to ask"
        problem = f"has no {what} that can be read ({cause}); give a hub id, a model folder or {BUILTIN}tiny"
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            problem = REMOTE_CODE
        raise ModelError(f"{name}: {problem}") from None


def read_config(folder: Path) -> Json:
    """Read the config of the language model in a run or model folder; raise ModelError if it is missing or wrong."""
    remedy = "copy it from the model that was tuned: the base or what extend wrote"
    return language_config(read_json(folder / CONFIG_FILE, Json, remedy))


def save_config(config: Config, folder: Path) -> None:
    """Write `config.json` in both dialects, that of a composite whole."""
    write_json(folder / CONFIG_FILE, whole_config(with_legacy_rope_keys(config)), sort_keys=True)


class AdapterSettings(BaseModel):
    """The settings of an adapter that are used here; there are others, and PEFT reads the file again.

    The name of the base is without `EXTENDED`.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    peft_type: str
    base_model_name_or_path: Annotated[str, AfterValidator(lambda name: name.removesuffix(EXTENDED))] | None = None
    revision: str | None = None
    r: Annotated[int, Field(gt=0)] = 8
    lora_alpha: Annotated[float, Field(allow_inf_nan=False)] = 8
    use_rslora: bool | None = False
    use_dora: bool | None = False
    init_lora_weights: bool | str | None = True
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None
    alpha_pattern: dict[str, float] | None = None

    def scaling(self, module: str, rank: int) -> float:
        """Return the factor of `B A`: alpha / rank, or alpha / sqrt(rank) (rank-stabilized, Kalajdzievski 2023).

        >>> patterns = {"mlp.up_proj": 2}
        >>> settings = AdapterSettings(peft_type="LORA", lora_alpha=8, alpha_pattern=patterns)
        >>> settings.scaling("model.layers.0.mlp.up_proj", 4)
        0.5
        """
        alpha = self.lora_alpha
        for pattern, pattern_alpha in (self.alpha_pattern or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = pattern_alpha
                break
        divisor = math.sqrt(rank) if self.use_rslora else rank
        return alpha / divisor


def read_adapter_settings(folder: Path) -> AdapterSettings:
    """Read the settings of the adapter in a folder; raise ModelError if they are missing or wrong."""
    file = folder / ADAPTER_CONFIG_FILE
    settings = read_json(file, AdapterSettings, "tune or download it again")
    if settings.peft_type != "LORA":
        raise ModelError(f"{file}: peft_type {settings.peft_type}: only LoRA adapters can be loaded and merged")
    return settings
