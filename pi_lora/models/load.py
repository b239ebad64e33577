"""Models as a user names them: bases, full weights and run folders, loaded with their scaling."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.models.base import (
    ADAPTER_CONFIG_FILE,
    BaseModel,
    Placement,
    default_dtype,
    dtype_named,
    extended_config,
    find_base,
    load_model,
    load_tokenizer,
    read_config,
)
from pi_lora.recipe.files import RECIPE_FILE, load_recipe
from pi_lora.scaling.config import Config, Method, full_attention_rope, in_both_dialects, scale_of, window_of
from pi_lora.scaling.extend import leads_to


@dataclass(frozen=True)
class Stretch:
    """What an evaluation asks of a plain base: the paper's step 0 (`pi`), no rescaling (`direct`), or other methods."""

    target: int
    original: int | None = None
    method: Method = "pi"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be measured, with its own scaling."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    config: Config

    @property
    def scale(self) -> float:
        """The factor L'/L by which it is stretched; its positions are divided by it under `pi`."""
        return scale_of(self.config)

    @property
    def window(self) -> int:
        """Its context window in tokens."""
        return window_of(self.config)


def load(name: str, stretch: Stretch | None = None, dtype: str | None = None) -> LoadedModel:
    """Load a hub id, a folder of full weights, `builtin:tiny`, or a run or adapter folder with its own scaling.

    Raises:
        ModelError: there is no such model, it is damaged, or an adapter's base disagrees with it.
        ScalingError: `stretch` asks for what the model cannot do.
    """
    if is_adapter(name):
        if stretch is not None:
            raise ModelError(f"{name}: brings its own scaling; leave out --original, --target and --scaling")
        return _load_adapter_run(Path(name), dtype)
    base = find_base(name)
    interpolation = base.interpolation(stretch.method, stretch.target, stretch.original) if stretch else None
    config = extended_config(base, interpolation)
    model = load_model(base, config, _dtype(dtype, base.config))
    return LoadedModel(name, model.eval(), load_tokenizer(base.path, window_of(config)), config)


def config_named(name: str) -> Config:
    """The config of a model as `load` would load it, without reading weights.

    Raises:
        ModelError, ScalingError: what `load` would raise, as far as it shows before the weights are read.
    """
    return adapter_base(Path(name))[1] if is_adapter(name) else find_base(name).config


def is_adapter(name: str | Path) -> bool:
    """Whether a folder holds an adapter rather than full weights."""
    return (Path(name) / ADAPTER_CONFIG_FILE).is_file()


def adapter_base(folder: Path, override: str | None = None) -> tuple[BaseModel, dict[str, Any]]:
    """The base of an adapter folder, and the extended config that the run was tuned under.

    Raises:
        ModelError: the folder's config does not extend this base: another size, vocabulary, rotary base or window.
    """
    config = read_config(folder)
    base = _tuned_from(folder) if override is None else find_base(override)
    own = in_both_dialects(base.config)
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    differing = [
        f"{key} {own.get(key)} instead of {config.get(key)}" for key in keys if own.get(key) != config.get(key)
    ]
    theta, expected = full_attention_rope(own)["rope_theta"], full_attention_rope(config)["rope_theta"]
    if theta != expected:
        differing.append(f"rope_theta {theta} instead of {expected}")
    if not leads_to(own, config):
        differing.append(f"its own scale {scale_of(own):g} does not lead to {scale_of(config):g}")
    if differing:
        raise ModelError(f"{folder}: was not tuned from {base.name}: {'; '.join(differing)}; name its own base")
    return base, config


def _tuned_from(folder: Path) -> BaseModel:
    """The base that an adapter folder names; whether to run code that it brings, the recipe says."""
    adapter = json.loads((folder / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
    recipe = folder / RECIPE_FILE
    trusted = recipe.is_file() and load_recipe(recipe).recipe.model.trust_remote_code
    return find_base(adapter["base_model_name_or_path"], adapter.get("revision") or "main", trusted)


def tuned_quantized(folder: Path) -> bool:
    """Return whether the adapter in a folder was tuned on an NF4 base; not known of a folder without a recipe."""
    kept = folder / RECIPE_FILE
    return kept.is_file() and load_recipe(kept).recipe.tuning.method == "qlora"


def _load_adapter_run(folder: Path, dtype: str | None) -> LoadedModel:
    # Imported here: PEFT takes seconds, and bases and full weights do without.
    from pi_lora.models.adapter import load_adapter

    base, config = adapter_base(folder)
    loaded_dtype = _dtype(dtype, base.config)
    place: Placement = "device"
    if tuned_quantized(folder):
        loaded_dtype, place = dtype_named(dtype or "bfloat16"), "quantized"
    model = load_adapter(load_model(base, config, loaded_dtype, place=place), folder)
    return LoadedModel(str(folder), model, load_tokenizer(folder, window_of(config)), config)


def _dtype(named: str | None, config: Config) -> Any:
    return dtype_named(named) if named else default_dtype(config.get("dtype"))
