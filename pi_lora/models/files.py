"""The files of models: where they are (a folder, the cache of the hub, or the package itself), one checked reader for
each small one, and a digest of weights. No torch.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

from huggingface_hub import hf_hub_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import EntryNotFoundError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open

from pi_lora.errors import ModelError, first_line
from pi_lora.scaling.config import Config, with_legacy_rope_keys
from pi_lora.storage import read_json
from pi_lora.types import Json

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
# As PEFT names them.
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
# What follows the base's name in the adapters that are released with pi-lora.
EXTENDED = " (extended by pi-lora: load it with pi_lora.load, or merge it)"
# A key in the settings of an adapter of an extended base. `PeftModel.from_pretrained` takes any base, and nothing there
# stops it or scales its positions; but PEFT warns of a key that it does not know, by its name, and ignores it.
WARNING = "the base needs the config.json beside this file: load it with pi_lora.load, or merge it"
BUILTIN = "builtin:"
BUILTIN_FOLDER = Path(__file__).parents[1] / "builtin"
REMOTE_CODE = "runs Python code of its own; read that code, and if you trust it give --trust-remote-code"
# Of each tensor its first, middle and last bytes are read: other weights differ everywhere.
SAMPLE_BYTES = 4096


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


def find_file(path: str, name: str, revision: str = "main") -> Path | None:
    """Return a file of the folder or hub id `path`, downloaded if necessary, or None if there is none."""
    if os.path.isdir(path):
        return file if (file := Path(path, name)).is_file() else None
    try:
        return Path(hf_hub_download(path, name, revision=revision))
    except EntryNotFoundError:  # or not in the cache, without a network
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {name} cannot be downloaded ({first_line(error)}); check name and network") from None


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


class _Stored(BaseModel):
    """Fields that are read here; there are others."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


def read_config(folder: Path) -> Json:
    """Read the config in a run or model folder; raise ModelError if it is missing or wrong."""
    return read_json(folder / CONFIG_FILE, Json, "copy it from the model that was tuned: the base or what extend wrote")


def save_config(config: Config, folder: Path) -> None:
    """Write `config.json` in both dialects."""
    text = json.dumps(with_legacy_rope_keys(config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


class AdapterSettings(_Stored):
    """PEFT's settings of an adapter, as far as they are used here; PEFT itself reads the file again. The base's name is
    without `EXTENDED`.
    """

    peft_type: str
    base_model_name_or_path: Annotated[str, AfterValidator(lambda name: name.removesuffix(EXTENDED))] | None = None
    revision: str | None = None
    r: Annotated[int, Field(gt=0)] = 8
    lora_alpha: Annotated[float, Field(allow_inf_nan=False)] = 8
    use_rslora: bool | None = False
    init_lora_weights: bool | str | None = True
    modules_to_save: list[str] | None = None
    alpha_pattern: dict[str, float] | None = None

    def scaling(self, module: str, rank: int) -> float:
        """Return the factor of `B A`: alpha / rank, or alpha / sqrt(rank) (rank-stabilized, Kalajdzievski 2023).

        >>> patterns = {"mlp.up_proj": 2}
        >>> settings = AdapterSettings(peft_type="LORA", lora_alpha=8, alpha_pattern=patterns)
        >>> settings.scaling("model.layers.0.mlp.up_proj", 4)
        0.5
        """
        patterns = (self.alpha_pattern or {}).items()
        matching = (alpha for pattern, alpha in patterns if re.match(rf"(.*\.)?({pattern})$", module))
        return next(matching, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def read_adapter_settings(folder: Path) -> AdapterSettings:
    """Read PEFT's settings of the adapter in a folder; raise ModelError if they are missing or wrong."""
    file = folder / ADAPTER_CONFIG_FILE
    settings = read_json(file, AdapterSettings, "tune or download it again")
    if settings.peft_type != "LORA":
        raise ModelError(f"{file}: peft_type {settings.peft_type}: only LoRA adapters can be loaded and merged")
    return settings


# Of the format (https://huggingface.co/docs/safetensors): the length of the header before it.
LENGTH_BYTES, METADATA = 8, "__metadata__"


class TensorEntry(NamedTuple):
    """What the header of a safetensors file says of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def read_tensors(file: Path) -> tuple[int, dict[str, TensorEntry]]:
    """Return where the data of a safetensors file begins, in bytes, and the entries of its header by name; raise
    ModelError if it is damaged.
    """
    try:
        # The library validates extents, gaps, overlaps and the length of the file.
        with safe_open(file, framework="numpy"), file.open("rb") as content:
            size = int.from_bytes(content.read(LENGTH_BYTES), "little")
            header = json.loads(content.read(size))
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file}: missing, damaged or not safetensors ({first_line(error)}); download it again"
        ) from None
    header.pop(METADATA, None)
    entries = {name: TensorEntry(each["dtype"], each["shape"], each["data_offsets"]) for name, each in header.items()}
    return LENGTH_BYTES + size, entries


class _Index(_Stored):
    weight_map: dict[str, Annotated[str, Field(pattern=r"^[\w.-]+\.safetensors$")]] = Field(min_length=1)


def read_index(file: Path) -> dict[str, str]:
    """Read which file of a model's folder holds which tensor; raise ModelError if the index is damaged."""
    return read_json(file, _Index, "download it again").weight_map


def weights_digest(find_file: Callable[[str], Path | None]) -> str:
    """Return a SHA-256 of the names, types, shapes and sampled bytes of all tensors, however they share files;
    `find_file` gives the file of a name.
    """
    index = find_file(INDEX_FILE)
    files = map(find_file, sorted({*read_index(index).values()}) if index else [WEIGHTS_FILE])
    digests = dict(tensor for file in files if file for tensor in _tensors(file))
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def _tensors(file: Path) -> list[tuple[str, list[object]]]:
    """Return each tensor's name with its type, shape and a digest of sampled bytes."""
    start_of_data, entries = read_tensors(file)
    digests: list[tuple[str, list[object]]] = []
    with file.open("rb", buffering=0) as stream:
        for name, entry in entries.items():
            first, last = (start_of_data + offset for offset in entry.data_offsets)
            digest = hashlib.sha256()
            for start in sorted({first, max(first, (first + last) // 2), max(first, last - SAMPLE_BYTES)}):
                stream.seek(start)
                digest.update(stream.read(min(SAMPLE_BYTES, last - start)))
            digests.append((name, [entry.dtype, entry.shape, digest.hexdigest()]))
    return digests
