"""The small files of models: their location (a folder, the cache of the hub, or the package), and checked readers.

This module does not import torch.
"""

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from huggingface_hub import ModelCard
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from yaml import YAMLError

from pi_lora.errors import ModelError, first_line
from pi_lora.hub import commit_of, download_folder
from pi_lora.scaling.config import Config, language_config, whole_config, with_legacy_rope_keys
from pi_lora.storage import read_json, write_json
from pi_lora.types import Json

CONFIG_FILE = "config.json"
BITSANDBYTES = "bitsandbytes"
SETTINGS_FILE = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# The chat template of older composites, which belongs to their processor.
PROCESSOR_TEMPLATE = "chat_template.json"
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
    PROCESSOR_TEMPLATE,
    *VOCABULARY_FILES,
)
# What composites have beside their tokenizer.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
# As PEFT names them.
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
# One of these is in every folder of a model. Folders that hold such folders: of several models, as in the cache of the
# hub, and the root of that cache.
MODEL_FILES = (CONFIG_FILE, ADAPTER_CONFIG_FILE)
INSIDE = ("*/", "snapshots/*/", "*/snapshots/*/")
# The ending of the name of the base in the adapters that are released with pi-lora.
EXTENDED = " (extended by pi-lora: load it with pi_lora.load, or merge it)"
# A key in the settings of an adapter of an extended base. `PeftModel.from_pretrained` takes any base and does not scale
# its positions, but PEFT warns of a key that it does not know, with the name of the key, and ignores it.
WARNING = "the base needs the config.json beside this file: load it with pi_lora.load, or merge it"
CARD = "README.md"
# The vocabularies of tokenizers that bring their own code.
OWN_VOCABULARIES = ("*.tiktoken", "*.bpe", "*.spm")
# All that a hub id has beside full weights and pictures, with the vocabularies of tokenizers that bring their own code.
SMALL_FILES = (
    "*.json",
    "*.yaml",
    "*.py",
    "*.jinja",
    "*.txt",
    "*.model",
    *OWN_VOCABULARIES,
    CARD,
    ADAPTER_WEIGHTS_FILE,
)
BUILTIN = "builtin:"
BUILTIN_FOLDER = Path(__file__).parents[1] / "builtin"
REMOTE_CODE = "runs Python code of its own; read that code, and if you trust it give --trust-remote-code"


def model_folder(name: str, revision: str = "main") -> tuple[Path, str | None]:
    """Return the folder of a model, and for a hub id the commit.

    The small files of a hub id are downloaded; full weights are not. Raise ModelError if there is no such model.
    """
    if not is_local(name):
        commit = commit_of(name, revision)
        return download_folder(name, commit, SMALL_FILES), commit
    folder = Path(name).expanduser()
    if name.startswith(BUILTIN):
        folder = BUILTIN_FOLDER / name.removeprefix(BUILTIN)
    if folder.is_file():
        raise ModelError(f"{name}: is a file; name its folder, {folder.parent}")
    if not name or not folder.is_dir():
        raise ModelError(f"{name or 'an empty name'}: no such model; give a model folder, a hub id or {BUILTIN}tiny")
    if not find_files(folder, MODEL_FILES):
        inside = sorted({file.parent for place in INSIDE for kind in MODEL_FILES for file in folder.glob(place + kind)})
        if inside:
            raise ModelError(f"{name}: is no model, but holds some; name one, such as {inside[0]}")
    return folder, None


def read_card(folder: Path) -> Json:
    """Return the metadata of the model card in a folder; none if no card is there that can be read."""
    with suppress(OSError, ValueError, YAMLError):
        metadata: Json = ModelCard.load(folder / CARD).data.to_dict()
        return metadata
    return {}


def is_local(name: str) -> bool:
    """Whether a name cannot be a hub id, or is that of a file, a folder or a built-in model."""
    if name.startswith((".", "/", "~", BUILTIN)) or name.count("/") > 1:
        return True
    return Path(name).exists()


def public_name(name: str) -> str:
    """Return a name as strangers may read it: the last part of a path on this machine, and any other name as it is.

    >>> public_name("/home/me/books/*.txt"), public_name("~/base"), public_name("owner/base")
    ('*.txt', 'base', 'owner/base')
    """
    if name.startswith(("/", "~", ".")) or os.path.exists(name):
        return Path(name).name or name
    return name


def find_file(folder: Path, name: str) -> Path | None:
    """Return a file of a folder, or None if there is none."""
    file = folder / name
    return file if file.is_file() else None


def find_files(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return the files of a folder that have one of the `names`, by name."""
    return {name: folder / name for name in names if (folder / name).is_file()}


@contextmanager
def readable(name: str | Path, what: str) -> Iterator[None]:
    """Raise ModelError if transformers cannot read `what` of a model."""
    try:
        yield
    except Exception as error:  # config and tokenizer classes raise exceptions of any kind
        cause = first_line(error)
        problem = f"has no {what} that can be read ({cause}); give a hub id, a model folder or {BUILTIN}tiny"
        if isinstance(error, ImportError):
            problem = f"needs a package that is not installed ({cause}); install it"
        elif "does not recognize this architecture" in str(error):
            problem = f"this version of transformers lacks its type ({cause}); upgrade transformers, or choose another"
        elif isinstance(error, ValueError) and "trust_remote_code" in str(error):
            problem = REMOTE_CODE
        raise ModelError(f"{name}: {problem}") from None


def read_config(folder: Path) -> Json:
    """Read the config of the language model in a run or model folder; raise ModelError if it is missing or wrong."""
    remedy = "copy it, with its scaling, from the model that was tuned or that pi-lora extend wrote, or tune again"
    return language_config(read_json(folder / CONFIG_FILE, Json, remedy))


def save_config(config: Config, folder: Path) -> None:
    """Write `config.json` in both dialects, that of a composite whole."""
    write_json(folder / CONFIG_FILE, whole_config(with_legacy_rope_keys(config)), sort_keys=True)


def _by_module(tokens: object) -> object:
    """Return tokens by the end of the name of a module; PEFT means the embedding if it has a list."""
    return {"": tokens} if isinstance(tokens, list) else tokens or {}


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
    target_parameters: list[str] | None = None
    trainable_token_indices: Annotated[dict[str, list[int]], BeforeValidator(_by_module)] = {}
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
    settings = read_json(file, AdapterSettings, "name a LoRA adapter that PEFT wrote, or download it again")
    if settings.peft_type != "LORA":
        raise ModelError(
            f"{file}: peft_type {settings.peft_type}: only LoRA adapters can be loaded and merged; "
            "PEFT writes most others as LoRA: peft.save_as_lora(FOLDER, model, rank=1.0)"
        )
    return settings


def quantization_of(config: Config) -> str | None:
    """Return the kind of quantization of the weights of a model."""
    settings: Json | None = config.get("quantization_config")
    if not settings:
        return None
    # transformers before 4.31 left the kind out, and had one.
    kind: str = settings.get("quant_method") or BITSANDBYTES
    return kind


def methods_on(config: Config) -> tuple[str, ...]:
    """Return the values of `tuning.method` that the stored weights of a model take, by the config."""
    kind = quantization_of(config)
    if kind is None:
        return ("lora", "qlora", "full")
    return ("lora", "qlora") if kind == BITSANDBYTES else ("lora",)
