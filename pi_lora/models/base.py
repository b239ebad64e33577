"""The base model: found, checked, extended, loaded; and its config and tokenizer as files that every engine reads."""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import logging as transformers_logging
from transformers.utils import cached_file

from pi_lora.errors import ModelError, first_line
from pi_lora.models import tokenizer_files
from pi_lora.models.device import device
from pi_lora.models.finite import check_finite, finite_as_read
from pi_lora.models.gguf import dequantize, is_gguf, read_gguf, tokenizer_of
from pi_lora.models.stored import CONFIG_FILE, check_config, read_config
from pi_lora.recipe.places import cache_folder
from pi_lora.scaling import config as scaling
from pi_lora.scaling.verify import build_on_meta, check_scaling, config_of
from pi_lora.types import NOTHING, Allowed
from pi_lora.writing import make_once

Placement = Literal["device", "quantized", "host", "empty"]

BUILTIN = "builtin:"
BUILTIN_FOLDER = Path(__file__).parents[1] / "builtin"
REMOTE_CODE = "runs Python code of its own; read that code, and if you trust it give --trust-remote-code"
# Weights are read in this dtype to be quantized: read in another one, the same weight may have another NF4 value.
QUANTIZED_FROM = torch.bfloat16
# How many names a message shows of many.
SHOWN = 3


@dataclass(frozen=True)
class BaseModel:
    """A base model before its weights are read: its place, config class, and config as transformers completes it."""

    name: str
    place: str
    revision: str
    trust_remote_code: bool
    kind: type[PreTrainedConfig]
    config: Mapping[str, Any]

    @cached_property
    def folder(self) -> Path:
        """Where its files are: its folder, or that of its commit in the cache of the hub."""
        return Path(str(cached_file(self.path, CONFIG_FILE, revision=self.revision))).parent

    def file(self, name: str) -> Path | None:
        """Return one of its files, downloaded from the hub if necessary, or None if it has no such file."""
        try:
            return _file(self.path, name, self.revision)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.name}: {name} cannot be read ({first_line(error)})") from None

    def load_tokenizer(self, window: int, folder: Path | None = None) -> Any:
        """Load the tokenizer of this model, or the one that a run of it has in `folder`, for `window` tokens."""
        vocabulary = self.config.get("vocab_size")
        return load_tokenizer(folder or self.path, window, self.revision, self.trust_remote_code, vocabulary)

    def interpolation(self, method: scaling.Method, target: int, original: int | None = None) -> scaling.Interpolation:
        """Return the extension from this model's window (or `original`) to `target` tokens."""
        return scaling.Interpolation(method, original or scaling.window_of(self.config), target)

    @cached_property
    def path(self) -> str:
        """The folder or hub id that weights and tokenizer are read from; a GGUF file is dequantized into the cache."""
        if not is_gguf(self.place):
            return self.place
        file, config = Path(self.place), config_of(self.kind, self.config)
        folder = _in_cache(file)
        make_once(
            folder,
            folder.is_dir,
            lambda making: save_dequantized(file, config, making),
            lambda: None,
        )
        return str(folder)

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The unextended model on the meta device: every module with its shape, no memory for weights."""
        with quiet_loading():
            return build_on_meta(self.kind, self.config, self.trust_remote_code)


def find_base(name: str, revision: str = "main", allowed: Allowed = NOTHING) -> BaseModel:
    """Find a model by hub id, folder, GGUF file or `builtin:NAME` and read its config."""
    place, trust = _locate(name), allowed.remote_code
    if is_gguf(place) and (made := _in_cache(Path(place))).is_dir():
        place = str(made)
    if (Path(place) / CONFIG_FILE).exists():
        read_config(Path(place))
    try:
        if is_gguf(place):
            config = read_gguf(Path(place))
        else:
            with quiet_loading():
                config = AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=trust)
    except ModelError:
        raise
    except Exception as error:  # config classes raise their own kinds
        unknown = f"{first_line(error)}; give a hub id, a model folder or {BUILTIN}tiny"
        raise ModelError(f"{name}: {REMOTE_CODE if _wants_code(error) else unknown}") from None
    own: scaling.Config = _own_entries(config)
    check_config(own, name)
    if scaling.full_attention_rope(own).get("rope_type") == "linear" and not is_gguf(place):
        settings = _file(place, tokenizer_files.SETTINGS_FILE, revision)
        longest = tokenizer_files.read_settings(settings).model_max_length if settings else None
        own = scaling.declaring_original(own, longest)
    return BaseModel(name, place, revision, trust, type(config), own)


def extended_config(base: BaseModel, interpolation: scaling.Interpolation | None) -> dict[str, Any]:
    """Return the config of `base` extended by `interpolation` (or as it is), in both dialects."""
    if interpolation is None:
        return scaling.in_both_dialects(base.config)
    extended = scaling.extend_config(base.config, interpolation)
    if interpolation.method != "direct":
        with quiet_loading():
            check_scaling(base.skeleton, base.config, interpolation, base.trust_remote_code)
    return extended


def load_model(
    base: BaseModel, config: scaling.Config, dtype: torch.dtype, attention: str = "sdpa", place: Placement = "device"
) -> PreTrainedModel:
    """Load the weights of `base` under `config`, an extended one or its own. `place` is `device`, the accelerator if
    there is one; `quantized`, the same as NF4 with double quantization (QLoRA, Dettmers et al. 2023) that computes in
    `dtype`, made from bfloat16 whatever that is, so that its values are always those of training; `host`, from where
    FSDP spreads it over several GPUs; or `empty`, without reading any weights, for the processes that FSDP sends their
    shards from another one.

    Raises ModelError if they cannot be read, are not exactly those of the config, or are infinite or NaN.
    """
    if place == "empty":
        return _empty_model(base, config, dtype, attention)
    path = base.path
    with quiet_loading(), finite_as_read() as found:
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                config=config_of(base.kind, config),
                revision=base.revision,
                trust_remote_code=base.trust_remote_code,
                dtype=QUANTIZED_FROM if place == "quantized" else dtype,
                attn_implementation=attention,
                use_safetensors=True,
                # Reported below, with the names.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **(quantization(dtype) if place == "quantized" else {}),
            )
        except Exception as error:  # safetensors, transformers and the hub client raise their own kinds
            raise ModelError(f"{base.name}: its weights cannot be loaded ({first_line(error)})") from error
    _check_complete(base.name, report)
    if place == "quantized":
        _compute_in(dtype, model)
    loaded: PreTrainedModel = model.to(device()) if place == "device" else model
    if place == "quantized" or not all(found):
        check_finite(base.name, loaded.named_parameters())
    return loaded


def save_dequantized(file: Path, config: PreTrainedConfig, folder: Path) -> None:
    """Write the model in a GGUF file, whose config was read before, to `folder` like any other model."""
    with quiet_loading(), contextlib.redirect_stderr(io.StringIO()):  # transformers shows a bar of its own
        try:
            model, tokenizer = dequantize(file, config), tokenizer_of(file, config)
        except ModelError:
            raise
        except Exception as error:  # gguf, transformers and tokenizers raise their own kinds
            raise ModelError(f"{file}: cannot be dequantized ({first_line(error)})") from error
        model.save_pretrained(folder, max_shard_size="5GB")
    own = _own_entries(config)
    save_config({**own, "architectures": [type(model).__name__]}, folder)
    tokenizer.model_max_length = scaling.window_of(own)
    save_tokenizer(tokenizer, folder)


def _in_cache(file: Path) -> Path:
    """Return the folder for what is dequantized from `file` and the tokenizer beside it, as they are now."""
    parts = [file, file.with_name("tokenizer.json"), file.with_name("tokenizer_config.json")]
    stats = [(str(part.resolve()), part.stat().st_size, part.stat().st_mtime_ns) for part in parts if part.is_file()]
    return cache_folder() / "gguf" / hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def load_tokenizer(
    path: str | Path,
    window: int,
    revision: str = "main",
    trust_remote_code: bool = False,
    vocabulary: int | None = None,
) -> Any:
    """Load the tokenizer of a model or run, with `window` tokens as its longest input; raise ModelError if its files
    are damaged, or it gives tokens that a model of so large a `vocabulary` does not have.
    """
    tokenizer_files.check_files(lambda name: _file(str(path), name, revision))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises `Exception` itself
        reason = REMOTE_CODE if _wants_code(error) else f"has no tokenizer that can be read ({first_line(error)})"
        raise ModelError(f"{path}: {reason}") from None
    tokenizer.model_max_length = window
    tokenizer_files.read_special_tokens_as_text(tokenizer)
    tokenizer_files.try_out(tokenizer, str(path), vocabulary)
    return tokenizer


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer that transformers 4 reads as well, which does not know the class name that 5 writes."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings["tokenizer_class"] == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    # Ours is how texts are read here; others may write special tokens into a chat.
    settings |= {key: tokenizer.init_kwargs[key] for key in ("split_special_tokens",) if key in settings}
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def save_config(config: scaling.Config, folder: Path) -> None:
    """Write `config.json` in both dialects."""
    text = json.dumps(scaling.in_both_dialects(config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


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


def _check_complete(name: str, report: Mapping[str, Any]) -> None:
    """Raise ModelError if the weights are not exactly those that the config describes: transformers would give what is
    missing or has another shape random values, and leave out what it does not expect.
    """
    mismatched = [f"{key} is {list(stored)} instead of {list(own)}" for key, stored, own in report["mismatched_keys"]]
    kinds = {"lack": report["missing_keys"], "have": mismatched, "have beyond its config": report["unexpected_keys"]}
    problems = []
    for verb, found in kinds.items():
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        problems += [f"{verb} {', '.join(sorted(found)[:SHOWN])}{more}"] if found else []
    if problems:
        raise ModelError(f"{name}: its weights {', and '.join(problems)}; download all of its files")


def _wants_code(error: Exception) -> bool:
    """Whether transformers refused to run a model's or tokenizer's own code."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


def _empty_model(base: BaseModel, config: scaling.Config, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """Build the model of `base` with its own buffers, but weights in memory that is reserved and never touched: the
    optimizer is made before FSDP, and accelerate 1.15 tells its parameters apart by their addresses.
    """
    with quiet_loading(), init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config_of(base.kind, config),
            trust_remote_code=base.trust_remote_code,
            dtype=dtype,
            attn_implementation=attention,
        )
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.empty_like(weight, device="cpu")))
    model.tie_weights()
    return model.eval()


def _compute_in(dtype: torch.dtype, model: PreTrainedModel) -> None:
    """Let a quantized model compute in `dtype`, from the weights as they were quantized, whatever the processor.

    On processors with AVX512-BF16, bitsandbytes 0.50 repacks a layer at its first forward in evaluation mode, and then
    computes in bfloat16. It fails where the inner size is no multiple of the block size of 64 or the outer one of 32,
    rounds the scales of the blocks to bfloat16, and does not undo it for training, whose gradients then do not pass.
    """
    from bitsandbytes.nn.modules import Linear4bit  # an optional package

    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    model.config.dtype = dtype


def _own_entries(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a config as a dictionary, without common defaults and the path it was read from."""
    common, own = PreTrainedConfig().to_dict(), config.to_dict()
    return {key: own[key] for key in own if key != "_name_or_path" and (key not in common or common[key] != own[key])}


def _file(path: str, name: str, revision: str) -> Path | None:
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(path, name, revision=revision, **quiet)
    return Path(found) if found else None


def _locate(name: str) -> str:
    if name.startswith(BUILTIN):
        there = {BUILTIN + each.name: each for each in sorted(BUILTIN_FOLDER.iterdir()) if each.is_dir()}
        if name not in there:
            raise ModelError(f"{name}: no such built-in model; there is {', '.join(there)}")
        return str(there[name])
    folder = Path(os.path.expanduser(name))
    if is_gguf(name) and not folder.is_file():
        raise ModelError(f"{name}: no such file; give the path of a GGUF file")
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
    if looks_local and not (folder.is_dir() or is_gguf(name)):
        raise ModelError(f"{name}: no such folder; give a model folder, a hub id or {BUILTIN}tiny")
    return str(folder) if looks_local else name
