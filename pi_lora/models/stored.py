"""What model and adapter folders hold beside weights, one checked reader for each file: `config.json`, the adapter's
settings, the index of the weights. No torch.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import from_json

from pi_lora.errors import ModelError, first_line
from pi_lora.scaling.config import Config, in_both_dialects
from pi_lora.types import Json
from pi_lora.writing import first_problem, read_json

CONFIG_FILE = "config.json"
# As PEFT names them.
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
# What follows the base's name in the adapter of a model whose scaling the base's own config lacks. No model has such a
# name, so PEFT's AutoPeftModelForCausalLM and transformers' AutoModelForCausalLM, which would load the base by it and
# leave its positions unscaled without a word, fail and show it.
EXTENDED = " (extended by pi-lora: load it with pi_lora.load, or merge it)"
# A key of such an adapter's settings. `PeftModel.from_pretrained` takes any base, and nothing in the settings stops it
# or scales its positions; but PEFT warns of a key that it does not know, by its name, and ignores it.
WARNING = "the base needs the config.json beside this file: load it with pi_lora.load, or merge it"

# Far beyond every model there is; what is larger would only take memory, or minutes to build.
Size = Annotated[int, Field(gt=0, le=2**30)]
Heads = Annotated[int, Field(gt=0, le=2**16)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# The most patterns of an adapter that are more than names, and what each may have: a model of a thousand layers is
# matched in seconds then, whatever they are.
MOST_PATTERNS, MOST_LOOPS, MOST_WAYS, MOST_CHARACTERS = 16, 2, 64, 300
_PATTERN = re.compile(
    r"(?P<loop>(?:\\?\.|\\[dw]|\[[\w-]+\])[*+]\??)"
    r"|(?P<choice>\((?:\?:)?(?:[\w.-]|\\\.|\|)*\))"
    r"|[\w-]|\\?\.|\\[dw]|\[[\w-]+\]|\^|\$"
)


class _Stored(BaseModel):
    """Fields that are read here; there are others."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class _Rope(_Stored):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Annotated[float, Field(ge=1, le=1e6)] | None = None
    original_max_position_embeddings: Size | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    short_factor: Annotated[list[Positive], Field(max_length=2**16)] | None = None
    long_factor: Annotated[list[Positive], Field(max_length=2**16)] | None = None

    @model_validator(mode="after")
    def _has_its_factor(self) -> Self:
        if self.factor is None and (kind := self.rope_type or self.type) in ("linear", "dynamic", "yarn"):
            raise ValueError(f"has no factor, which {kind} needs")
        if (self.short_factor is None) != (self.long_factor is None):
            raise ValueError("has one of short_factor and long_factor alone")
        return self


class _RopeOfLayers(_Rope):
    rope_theta: Positive


class _Ropes(_Rope):
    full_attention: _RopeOfLayers | None = None
    sliding_attention: _RopeOfLayers | None = None


class ModelConfig(_Stored):
    """The fields of a model's config that decide its window and size; the dictionary goes on being what is used."""

    model_type: str | None = None
    hidden_size: Annotated[int, Field(gt=0, le=2**20)] | None = None
    head_dim: Heads | None = None
    qk_head_dim: Heads | None = None
    num_hidden_layers: Annotated[int, Field(gt=0, le=2_000)] | None = None
    num_attention_heads: Heads | None = None
    num_key_value_heads: Heads | None = None
    num_experts_per_tok: Heads | None = None
    vocab_size: Size | None = None
    max_position_embeddings: Size | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    layer_types: list[str] | None = None
    rope_theta: Positive | None = None
    rope_local_base_freq: Positive | None = None
    rope_parameters: _Ropes | None = None
    rope_scaling: _Ropes | None = None


def check_config(config: Mapping[str, Any], where: str | Path) -> None:
    """Raise ModelError that names the first field of a model's config which no model has so."""
    try:
        ModelConfig.model_validate(dict(config))
    except ValidationError as error:
        raise ModelError(f"{where}: {first_problem(error)}; correct it, or download the model again") from None


def read_config(folder: Path) -> Json:
    """Read the config in a run or model folder; raise ModelError if it is missing or wrong."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        how = "name a whole run, or merge an adapter made elsewhere: pi-lora merge ADAPTER --base MODEL --target L'"
        raise ModelError(f"{folder}: has no {CONFIG_FILE}, without which its scaling is unknown; {how}")
    config = read_json(file, Json, "tune or download it again")
    check_config(config, file)
    return config


def save_config(config: Config, folder: Path) -> None:
    """Write `config.json` in both dialects."""
    text = json.dumps(in_both_dialects(config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def check_pattern(pattern: str) -> str:
    r"""Return a pattern of PEFT's, a regular expression, if it takes no time: a name, or one with few wildcards.

    >>> print(check_pattern(r"layers\.1\..*up_proj"), check_pattern("self_attn.(q|v)_proj"))
    layers\.1\..*up_proj self_attn.(q|v)_proj
    """
    parts = list(_PATTERN.finditer(pattern[: MOST_CHARACTERS + 1]))
    ways = math.prod(part["choice"].count("|") + 1 for part in parts if part["choice"])
    if "".join(part[0] for part in parts) != pattern or _loops(pattern) > MOST_LOOPS or ways > MOST_WAYS:
        raise ValueError(f"{pattern[:60]!r} is a regular expression that may take very long; write names of modules")
    return pattern


def _loops(pattern: str) -> int:
    return sum(bool(part["loop"]) for part in _PATTERN.finditer(pattern))


def _check_patterns(patterns: Any) -> Any:
    if sum(not re.fullmatch(r"[\w.^$-]*", each) for each in map(check_pattern, patterns)) > MOST_PATTERNS:
        raise ValueError(f"has more than {MOST_PATTERNS} regular expressions; write names of modules")
    return patterns


class AdapterSettings(_Stored):
    """PEFT's settings of an adapter, as far as they are used here; PEFT itself reads the file again. The base's name is
    without `EXTENDED`.
    """

    peft_type: str
    base_model_name_or_path: Annotated[str, AfterValidator(lambda name: name.removesuffix(EXTENDED))] | None = None
    revision: str | None = None
    r: Annotated[int, Field(gt=0, le=2**20)] = 8
    lora_alpha: Annotated[float, Field(allow_inf_nan=False)] = 8
    use_rslora: bool | None = False
    use_dora: bool | None = False
    init_lora_weights: bool | str | None = True
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: Annotated[list[str], AfterValidator(_check_patterns)] | None = None
    rank_pattern: Annotated[dict[str, int], AfterValidator(_check_patterns)] | None = None
    alpha_pattern: Annotated[dict[str, float], AfterValidator(_check_patterns)] | None = None

    @property
    def names_targets(self) -> bool:
        """Whether target modules are names: those that regular expressions choose are taken from the weights."""
        chosen = isinstance(self.target_modules, str) and self.target_modules != "all-linear"
        return not (chosen or isinstance(self.exclude_modules, str) or self.layers_pattern)

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
    """Read PEFT's settings of the adapter in a folder; raise ModelError if they are missing, wrong or unsafe."""
    file = folder / ADAPTER_CONFIG_FILE
    settings = read_json(file, AdapterSettings, "tune or download it again")
    if settings.peft_type != "LORA":
        raise ModelError(f"{file}: peft_type {settings.peft_type}: only LoRA adapters can be loaded and merged")
    return settings


# Of the format (https://huggingface.co/docs/safetensors): the length of the header before it, and the longest header.
LENGTH_BYTES, MOST_HEADER, METADATA = 8, 100_000_000, "__metadata__"


class TensorEntry(_Stored):
    """What the header of a safetensors file says of a tensor."""

    dtype: str
    shape: list[Annotated[int, Field(ge=0, lt=2**62)]]
    data_offsets: list[Annotated[int, Field(ge=0, lt=2**62)]] = Field(min_length=2, max_length=2)

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Self:
        if self.data_offsets[1] < self.data_offsets[0]:
            raise ValueError("its data ends before it begins")
        return self


_HEADER = TypeAdapter(dict[str, TensorEntry])


def read_tensors(file: Path) -> tuple[int, dict[str, TensorEntry]]:
    """Return where the data of a safetensors file begins, in bytes, and the entries of its header by name; raise
    ModelError if it is damaged.
    """
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(LENGTH_BYTES), "little")
            if size > MOST_HEADER:
                raise ValueError(f"a header of {size:,} bytes")
            entries = from_json(content.read(size))
        if isinstance(entries, dict):
            entries.pop(METADATA, None)
        return LENGTH_BYTES + size, _HEADER.validate_python(entries)
    except ValidationError as error:
        why = first_problem(error)
    except (OSError, ValueError) as error:
        why = first_line(error)
    raise ModelError(f"{file}: truncated, damaged or not safetensors ({why}); download it again")


def _check_file_name(name: str) -> str:
    if not re.fullmatch(r"[\w.-]+\.safetensors", name):
        raise ValueError(f"{name[:60]!r} is not the name of a safetensors file")
    return name


class _Index(_Stored):
    weight_map: dict[str, Annotated[str, AfterValidator(_check_file_name)]] = Field(min_length=1)


def read_index(file: Path) -> dict[str, str]:
    """Read which file of a model's folder holds which tensor; raise ModelError if the index is damaged."""
    return read_json(file, _Index, "download it again").weight_map
