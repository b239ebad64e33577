"""Models as users name them (bases, full weights, runs), found and loaded with their scaling."""

import shlex
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.models import base as bases
from pi_lora.models.base import BaseModel, Placement, find_base
from pi_lora.models.device import device, dtype_named
from pi_lora.models.machine import attention_kernel, dtype_of_base, measured_under_autocast
from pi_lora.models.origin import check_origin, read_origin
from pi_lora.models.stored import ADAPTER_CONFIG_FILE, read_adapter_settings, read_config
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.recipe.schema import Recipe
from pi_lora.scaling.config import Config, Method, full_attention_rope, in_both_dialects, leads_to, scale_of, window_of
from pi_lora.types import NOTHING, Allowed


@dataclass(frozen=True)
class Stretch:
    """How an evaluation extends a plain base: the paper's step 0 (`pi`), no rescaling (`direct`), or other methods."""

    target: int
    original: int | None = None
    method: Method = "pi"


class _Scaled:
    config: Config

    @property
    def scale(self) -> float:
        """The factor L'/L by which the window is extended; under `pi` positions are divided by it."""
        return scale_of(self.config)

    @property
    def window(self) -> int:
        """The context window in tokens."""
        return window_of(self.config)


@dataclass(frozen=True)
class FoundModel(_Scaled):
    """A model before its weights are read: its base, the config it is loaded under, and the folder of an adapter."""

    name: str
    base: BaseModel
    config: Config
    adapter: Path | None = None
    allowed: Allowed = NOTHING

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the run, or of the base."""
        # Adapters made elsewhere may have none of their own.
        own = self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file()
        return self.base.load_tokenizer(self.window, self.adapter if own else None)

    def load(self, dtype: str | None = None) -> "LoadedModel":
        """Read the weights: by default in float32 on a CPU, in bfloat16 after QLoRA, and on an accelerator as stored; a
        run's as they are tuned there.
        """
        if self.adapter is not None:
            check_origin(self.adapter, self.base, self.allowed)
        recipe, on_cpu = _recipe_of(self.adapter or Path(self.name)), device().type == "cpu"
        quantized = self.adapter is not None and recipe is not None and recipe.tuning.method == "qlora"
        place: Placement = "quantized" if quantized else "device"
        stored = "float32" if on_cpu else str(self.base.config.get("dtype") or "float32").removeprefix("torch.")
        of_weights = dtype_named(dtype or stored)
        if dtype is None and self.adapter and recipe and (quantized or not on_cpu):
            of_weights = dtype_of_base(recipe)
        kernel = attention_kernel("auto", self.base, of_weights == torch.bfloat16)
        model = bases.load_model(self.base, self.config, of_weights, kernel, place).eval()
        if self.adapter is not None:
            # Imported here: PEFT takes seconds, and bases and full weights do without.
            from pi_lora.models.adapter import load_adapter

            model = load_adapter(model, self.adapter)
        as_tuned = recipe if dtype is None and of_weights == torch.float32 else None
        autocast = as_tuned is not None and measured_under_autocast(as_tuned)
        if autocast:
            # Without a cache, which would hold all weights a second time.
            model.forward = torch.autocast(model.device.type, torch.bfloat16, cache_enabled=False)(model.forward)
        return LoadedModel(self.name, model, self.tokenizer, self.config, self, autocast)


@dataclass(frozen=True)
class LoadedModel(_Scaled):
    """A model ready to be measured, with its own scaling; what it was loaded from, if it was; and whether its float32
    weights compute in bfloat16.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    config: Config
    found: FoundModel | None = None
    autocast: bool = False


def find(name: str, stretch: Stretch | None = None, allowed: Allowed = NOTHING) -> FoundModel:
    """Find a hub id, a folder of full weights, `builtin:tiny`, or a run or adapter folder with its own scaling."""
    if is_adapter(name):
        if stretch is not None:
            raise ModelError(f"{name}: brings its own scaling; leave out --original, --target and --scaling")
        base, config = adapter_base(Path(name), allowed=allowed)
        return FoundModel(name, base, config, Path(name), allowed)
    base = find_base(name, allowed=allowed)
    interpolation = base.interpolation(stretch.method, stretch.target, stretch.original) if stretch else None
    return FoundModel(name, base, bases.extended_config(base, interpolation))


def load(
    name: str, stretch: Stretch | None = None, dtype: str | None = None, allowed: Allowed = NOTHING
) -> LoadedModel:
    """Load a model with its scaling, ready to be measured; `window` and `scale` L'/L stand beside `model` and
    `tokenizer`.

    Args:
        name: A hub id, a folder of full weights, a GGUF file, `builtin:tiny`, or the folder of a run or adapter, which
            brings its own scaling.
        stretch: How to extend a plain base that was not tuned, such as `Stretch(target=16384)`.
        dtype: `float32`, `bfloat16` or `float16`; by default as stored on a GPU, float32 on a CPU, and bfloat16 after
            QLoRA.
        allowed: Whether a model's own code may run, and a run be used whose base or data changed.

    Raises:
        ModelError: The model is missing, incomplete or not the one that a run was tuned from.
        ScalingError: Its positions cannot be interpolated.
    """
    return find(name, stretch, allowed).load(dtype)


def is_adapter(name: str | Path) -> bool:
    """Return whether a folder holds an adapter rather than full weights."""
    return (Path(name) / ADAPTER_CONFIG_FILE).is_file()


def adapter_base(
    folder: Path, override: str | None = None, allowed: Allowed = NOTHING
) -> tuple[BaseModel, dict[str, Any]]:
    """Return the base of an adapter folder, and the config it was tuned under; raise ModelError if they disagree."""
    config, base = read_config(folder), base_of_adapter(folder, override, allowed)
    own = in_both_dialects(base.config)
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    sizes = {key: (own.get(key), config.get(key)) for key in keys}
    sizes["rope_theta"] = full_attention_rope(own)["rope_theta"], full_attention_rope(config)["rope_theta"]
    differing = [f"{key} {has} instead of {expected}" for key, (has, expected) in sizes.items() if has != expected]
    if not leads_to(own, config):
        differing.append(f"its own scale {scale_of(own):g} does not lead to {scale_of(config):g}")
    if differing:
        raise ModelError(f"{folder}: was not tuned from {base.name}: {'; '.join(differing)}; name its own base")
    return base, config


def base_of_adapter(folder: Path, override: str | None = None, allowed: Allowed = NOTHING) -> BaseModel:
    """Return the base that an adapter folder names, or `override`; raise ModelError if there is neither."""
    if override:
        return find_base(override, allowed=allowed)
    adapter, known = read_adapter_settings(folder), read_origin(folder)
    if not (name := adapter.base_model_name_or_path):
        how = f"name it there, or merge them: pi-lora merge {shlex.quote(str(folder))} --base MODEL"
        raise ModelError(f"{folder / ADAPTER_CONFIG_FILE}: base_model_name_or_path: is missing; {how}")
    revision = adapter.revision or "main"
    if known and (known.commit or (known.place and Path(known.place).exists())):
        # Where it was then: a relative path means another folder from elsewhere, and branches move.
        return replace(find_base(known.place or name, known.commit or revision, allowed), name=name)
    return find_base(name, revision, allowed)


def tuned_quantized(folder: Path) -> bool:
    """Return whether the adapter in a folder was tuned on an NF4 base; not known of a folder without a recipe."""
    recipe = _recipe_of(folder)
    return recipe is not None and recipe.tuning.method == "qlora"


def _recipe_of(folder: Path) -> Recipe | None:
    return load_recipe(folder / RECIPE_FILE).recipe if (folder / RECIPE_FILE).is_file() else None
