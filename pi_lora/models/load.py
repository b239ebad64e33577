"""Models as users name them (bases, full weights, runs), found and loaded with their scaling."""

import json
from dataclasses import dataclass
from functools import cached_property
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
    """How an evaluation extends a plain base: the paper's step 0 (`pi`), no rescaling (`direct`), or other methods."""

    target: int
    original: int | None = None
    method: Method = "pi"


@dataclass(frozen=True)
class FoundModel:
    """A model before its weights are read: its base, and the config that it is loaded under.

    `adapter` is the folder of a run or adapter, None for full weights.
    """

    name: str
    base: BaseModel
    config: Config
    adapter: Path | None = None

    @property
    def scale(self) -> float:
        """The factor L'/L by which the window is extended; under `pi` positions are divided by it."""
        return scale_of(self.config)

    @property
    def window(self) -> int:
        """The context window in tokens."""
        return window_of(self.config)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the run, or of the base."""
        return load_tokenizer(self.adapter or self.base.path, self.window)

    def load(self, dtype: str | None = None) -> "LoadedModel":
        """Read the weights: by default as stored on an accelerator, in float32 on a CPU, in bfloat16 after QLoRA.

        Raises:
            ModelError: weights or tokenizer are missing or damaged.
        """
        wanted = dtype_named(dtype) if dtype else default_dtype(self.base.config.get("dtype"))
        if self.adapter is None:
            return LoadedModel(
                self.name, load_model(self.base, self.config, wanted).eval(), self.tokenizer, self.config, self
            )
        # Imported here: PEFT takes seconds, and bases and full weights do without.
        from pi_lora.models.adapter import load_adapter

        place: Placement = "device"
        if tuned_quantized(self.adapter):
            wanted, place = dtype_named(dtype or "bfloat16"), "quantized"
        model = load_adapter(load_model(self.base, self.config, wanted, place=place), self.adapter)
        return LoadedModel(self.name, model, self.tokenizer, self.config, self)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be measured, with its own scaling; `found` is what it was loaded from, if it was."""

    name: str
    model: PreTrainedModel
    tokenizer: Any
    config: Config
    found: FoundModel | None = None

    @property
    def scale(self) -> float:
        """The factor L'/L by which the window is extended; under `pi` positions are divided by it."""
        return scale_of(self.config)

    @property
    def window(self) -> int:
        """The context window in tokens."""
        return window_of(self.config)


def find(name: str, stretch: Stretch | None = None) -> FoundModel:
    """Find a hub id, a folder of full weights, `builtin:tiny`, or a run or adapter folder with its own scaling.

    Raises:
        ModelError: there is no such model, or an adapter's base disagrees with it.
        ScalingError: `stretch` asks for what the model cannot do.
    """
    if is_adapter(name):
        if stretch is not None:
            raise ModelError(f"{name}: brings its own scaling; leave out --original, --target and --scaling")
        base, config = adapter_base(Path(name))
        return FoundModel(name, base, config, Path(name))
    base = find_base(name)
    interpolation = base.interpolation(stretch.method, stretch.target, stretch.original) if stretch else None
    return FoundModel(name, base, extended_config(base, interpolation))


def load(name: str, stretch: Stretch | None = None, dtype: str | None = None) -> LoadedModel:
    """Load a model as `find` finds it.

    Raises:
        ModelError: there is no such model, it is damaged, or an adapter's base disagrees with it.
        ScalingError: `stretch` asks for what the model cannot do.
    """
    return find(name, stretch).load(dtype)


def is_adapter(name: str | Path) -> bool:
    """Return whether a folder holds an adapter rather than full weights."""
    return (Path(name) / ADAPTER_CONFIG_FILE).is_file()


def adapter_base(folder: Path, override: str | None = None) -> tuple[BaseModel, dict[str, Any]]:
    """Return the base of an adapter folder, and the extended config that it was tuned under.

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
    """Find the base that an adapter folder names; the recipe says whether to run the base's code."""
    adapter = json.loads((folder / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
    recipe = folder / RECIPE_FILE
    trusted = recipe.is_file() and load_recipe(recipe).recipe.model.trust_remote_code
    return find_base(adapter["base_model_name_or_path"], adapter.get("revision") or "main", trusted)


def tuned_quantized(folder: Path) -> bool:
    """Return whether the adapter in a folder was tuned on an NF4 base; not known of a folder without a recipe."""
    kept = folder / RECIPE_FILE
    return kept.is_file() and load_recipe(kept).recipe.tuning.method == "qlora"
