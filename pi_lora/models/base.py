"""The base model: found, checked, extended, loaded; and its config and tokenizer as files that every engine reads."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import logging as transformers_logging

from pi_lora.errors import ModelError
from pi_lora.models.nf4 import keep_as_quantized
from pi_lora.scaling.config import Config, Interpolation, Method, in_both_dialects, read_rope, window_of
from pi_lora.scaling.extend import extend_config
from pi_lora.scaling.verify import build_on_meta, check_scaling

Placement = Literal["device", "quantized", "host"]

BUILTIN = "builtin:"
BUILTIN_FOLDER = Path(__file__).parents[1] / "builtin"
CONFIG_FILE = "config.json"
# As PEFT names them.
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class BaseModel:
    """A base model before its weights are read: its place, config class, and config as transformers completes it."""

    name: str
    path: str
    revision: str
    trust_remote_code: bool
    kind: type[PreTrainedConfig]
    config: Mapping[str, Any]

    def interpolation(self, method: Method, target: int, original: int | None = None) -> Interpolation:
        """Return the extension from this model's window (or `original`) to `target` tokens."""
        return Interpolation(method, original or window_of(self.config), target)

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The unextended model on the meta device: every module with its shape, no memory for weights."""
        with quiet_loading():
            return build_on_meta(self.kind, self.config, self.trust_remote_code)


def find_base(name: str, revision: str = "main", trust_remote_code: bool = False) -> BaseModel:
    """Find a model by hub id, folder or `builtin:NAME` and read its config."""
    path = _locate(name)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{name}: {first_line(error)}; give a hub id, a model folder or {BUILTIN}tiny") from None
    found = BaseModel(name, path, revision, trust_remote_code, type(config), _own_entries(config))
    read_rope(found.config)
    return found


def extended_config(base: BaseModel, interpolation: Interpolation | None) -> dict[str, Any]:
    """Return the config of `base` extended by `interpolation` (or as it is), in both dialects."""
    if interpolation is None:
        return in_both_dialects(base.config)
    extended = extend_config(base.config, interpolation)
    if interpolation.method != "direct":
        with quiet_loading():
            check_scaling(base.skeleton, base.config, interpolation, base.trust_remote_code)
    return extended


def load_model(
    base: BaseModel, config: Config, dtype: torch.dtype, attention: str = "sdpa", place: Placement = "device"
) -> PreTrainedModel:
    """Load the weights of `base` under `config`, an extended one or its own. `place` is `device`, the accelerator if
    there is one; `quantized`, the same as NF4 with double quantization (QLoRA, Dettmers et al. 2023) that computes in
    `dtype`; or `host`, from where FSDP spreads it over several GPUs.
    """
    with quiet_loading():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                base.path,
                config=base.kind.from_dict(deepcopy(dict(config))),
                revision=base.revision,
                trust_remote_code=base.trust_remote_code,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                **(quantization(dtype) if place == "quantized" else {}),
            )
        except Exception as error:  # safetensors, transformers and the hub client raise their own kinds
            raise ModelError(f"{base.name}: its weights cannot be loaded ({first_line(error)})") from error
    if place == "quantized":
        keep_as_quantized(model)
    loaded: PreTrainedModel = model.to(device()) if place == "device" else model
    return loaded


def load_tokenizer(path: str | Path, window: int) -> Any:
    """Load the tokenizer of a model or run, with `window` tokens as its longest input."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path}: has no tokenizer that can be read ({first_line(error)})") from None
    tokenizer.model_max_length = window
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer that transformers 4 reads as well, which does not know the class name that 5 writes."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings["tokenizer_class"] == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def save_config(config: Config, folder: Path) -> None:
    """Write `config.json` in both dialects."""
    text = json.dumps(in_both_dialects(config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a run or model folder; raise ModelError if it is missing or not JSON."""
    try:
        return dict(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ModelError(f"{folder}: has no {CONFIG_FILE}; without it the scaling is unknown") from None
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{folder / CONFIG_FILE}: cannot be read ({first_line(error)})") from None


def device() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(stored: object) -> torch.dtype:
    """Return the dtype that a model is measured in: as stored on an accelerator, float32 on a CPU."""
    return torch.float32 if device().type == "cpu" or stored is None else dtype_named(str(stored).split(".")[-1])


def has_fast_bfloat16() -> bool:
    """Return whether bfloat16 arithmetic is faster than float32: on a GPU, and on a CPU with instructions for it."""
    return bool(torch.cuda.is_bf16_supported()) if device().type == "cuda" else has_bfloat16_instructions()


def has_bfloat16_instructions() -> bool:
    """Whether the processor multiplies in bfloat16 (AVX512-BF16 or AMX)."""
    return any(torch.cpu.get_capabilities().get(each) for each in ("avx512_bf16", "amx_bf16"))


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype of that name, such as `bfloat16`."""
    found: torch.dtype = getattr(torch, name)
    return found


def quantization(dtype: torch.dtype) -> dict[str, Any]:
    """Return the options with which `from_pretrained` quantizes on the device; a quantized model cannot be moved."""
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, **nf4)
    here = device() if device().type == "cpu" else torch.cuda.current_device()
    return {"quantization_config": how, "device_map": {"": here}}


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers' progress bars and notes off the terminal; errors are exceptions all the same."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _own_entries(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a config as a dictionary, without common defaults and the path it was read from."""
    common, own = PreTrainedConfig().to_dict(), config.to_dict()
    return {key: own[key] for key in own if key != "_name_or_path" and (key not in common or common[key] != own[key])}


def _locate(name: str) -> str:
    if name.startswith(BUILTIN):
        folder = BUILTIN_FOLDER / name.removeprefix(BUILTIN)
        if not folder.is_dir():
            there = ", ".join(BUILTIN + each.name for each in sorted(BUILTIN_FOLDER.iterdir()) if each.is_dir())
            raise ModelError(f"{name}: no such built-in model; there is {there}")
        return str(folder)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
    folder = Path(name).expanduser()
    if looks_local and not folder.is_dir():
        raise ModelError(f"{name}: no such folder; give a model folder, a hub id or {BUILTIN}tiny")
    return str(folder) if looks_local else name


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
