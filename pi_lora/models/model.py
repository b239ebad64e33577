"""Models as users name them (bases, full weights, runs): found, then loaded with their scaling."""

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from pi_lora.errors import ModelError
from pi_lora.models import machine
from pi_lora.models.files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    BUILTIN,
    CONFIG_FILE,
    find_file,
    is_local,
    locate,
    read_adapter_settings,
    read_config,
    readable,
    weights_digest,
)
from pi_lora.models.machine import device, dtype_named
from pi_lora.models.tokenizer import SETTINGS_FILE, TOKENIZER_FILES, load_tokenizer
from pi_lora.models.weights import Placement, empty_weights, quiet_loading, read_weights
from pi_lora.recipe.files import RECIPE_FILE
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Fingerprint, Run, check_finished
from pi_lora.scaling.config import (
    Config,
    Extension,
    check_reach,
    extend_config,
    full_attention_rope,
    is_extension_of,
    method_of,
    normalize_max_positions,
    read_rope,
    scale_of,
    window_of,
    with_legacy_rope_keys,
)
from pi_lora.scaling.verify import build_on_meta, check_scaling, config_of
from pi_lora.storage import read_json
from pi_lora.types import NO_PERMISSIONS, Json, Permissions

FILES_OF_RUNS = ["*.json", "*.yaml", ADAPTER_WEIGHTS_FILE, *TOKENIZER_FILES]


@dataclass
class Model:
    """A model: found, when its configs are known, and loaded, when it has a `model` with weights.

    Attributes:
        name: What the user calls it.
        base: The name of its base; its own name if it is no adapter.
        path: The folder or hub id that the weights of the base are read from, at `revision`.
        kind: transformers' config class.
        base_config: The config of the base as transformers completes it.
        config: The config that it is loaded under, in both dialects: extended, or that of the base.
        adapter: The folder of an adapter of the base, if it is one.
        extension: How the base is extended, if that was asked for.
        model: The module of transformers or PEFT, once it is loaded.
        autocast: Whether its float32 weights compute in bfloat16.
        in_training: Whether its weights are tuned just now, and not those of its files.
    """

    name: str
    base: str
    path: str
    revision: str
    permissions: Permissions
    kind: type[PreTrainedConfig]
    base_config: Config
    config: Config
    adapter: Path | None = None
    extension: Extension | None = None
    model: Any = None
    autocast: bool = False
    in_training: bool = False

    def __str__(self) -> str:
        state = f"{self.model.dtype} on {self.model.device}" if self.model is not None else "not loaded"
        return f"{self.name}: {self.window:,} tokens, scale {self.scale:g}, {state}"

    @property
    def scale(self) -> float:
        """The factor L'/L by which the window is extended; under `pi` positions are divided by it."""
        return scale_of(self.config)

    @property
    def window(self) -> int:
        """The context window in tokens."""
        return window_of(self.config)

    @property
    def dtype(self) -> str:
        """The dtype of the weights, such as `bfloat16`."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def original(self) -> int:
        """The window L before the extension, in tokens."""
        if self.extension:
            return self.extension.original_of(self.base_config)
        # A config does not say by how much `direct` extended it.
        return self.run.metadata.original or round(self.window / self.scale)

    @property
    def kernel(self) -> str:
        """The attention kernel of the loaded model, by transformers' name."""
        return str(self.model.config._attn_implementation)

    @cached_property
    def run(self) -> Run:
        """Its folder, or that of the adapter, if it is a run."""
        return Run(self.adapter or Path(self.name))

    @property
    def needs_its_config(self) -> bool:
        """Whether the base is unscaled if it is loaded under its own config."""
        return read_rope(self.config) != read_rope(self.base_config)

    @cached_property
    def folder(self) -> Path:
        """Where the files of the base are: its folder, or that of its commit in the cache of the hub."""
        config = self.file(CONFIG_FILE)
        assert config, "it was found by its config"
        return config.parent

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe that it was tuned by, if it is a run."""
        return self.run.recipe if self.run.has_recipe else None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the run, or of the base."""
        # Adapters made elsewhere may have none of their own.
        own = self.adapter if self.adapter and (self.adapter / SETTINGS_FILE).is_file() else None
        trust, vocabulary = self.permissions.trust_remote_code, self.config.get("vocab_size")
        return load_tokenizer(own or self.path, self.window, self.revision, trust, vocabulary)

    @cached_property
    def meta_model(self) -> PreTrainedModel:
        """The unextended base on the meta device: every module with its shape, no memory for weights."""
        with quiet_loading():
            return build_on_meta(self.kind, self.base_config, self.permissions.trust_remote_code)

    @cached_property
    def weights_digest(self) -> str:
        """A digest of the weights of the base."""
        return weights_digest(self.file)

    def file(self, name: str) -> Path | None:
        """Return a file of the base, downloaded from the hub if necessary, or None if it has no such file."""
        return find_file(self.path, name, self.revision)

    def extended(self, extension: Extension) -> "Model":
        """Return this base extended; raise ScalingError if that is impossible, or transformers does not apply it."""
        config = extend_config(self.base_config, extension)
        if extension.scaling != "direct":
            with quiet_loading():
                check_scaling(self.meta_model, self.base_config, extension, self.permissions.trust_remote_code)
        return self.changed(config=config, extension=extension)

    def origin(self, tokenizer: str, data: str) -> Fingerprint:
        """Return what a run of this base is made from, with the digests of its tokenizer and data."""
        local = Path(self.path).is_dir()
        return Fingerprint(
            place=str(Path(self.path).resolve()) if local and not self.base.startswith(BUILTIN) else None,
            commit=None if local else self.folder.name,
            weights=self.weights_digest,
            tokenizer=tokenizer,
            data=data,
        )

    def is_base_of(self, run: Run) -> bool:
        """Whether a run was tuned from these weights, as far as it says from which."""
        if (known := run.metadata.origin) is None:
            return True
        same_commit = known.commit and not Path(self.path).is_dir() and known.commit == self.folder.name
        return bool(same_commit) or known.weights == self.weights_digest

    def check_base_fingerprint(self) -> None:
        """Raise ModelError if the weights of the base are not those that the adapter was tuned on."""
        if self.adapter and not self.permissions.allow_mismatch and not self.is_base_of(self.run):
            raise ModelError(
                f"{self.adapter}: {self.base} ({self.folder}) has other weights than those that it was tuned on; "
                "bring them back, or use these with --allow-mismatch"
            )

    def load(self, dtype: str | None = None) -> "Model":
        """Read the weights: by default in float32 on a CPU, in bfloat16 after QLoRA, and on an accelerator as stored; a
        run's as they are tuned there.
        """
        self.check_base_fingerprint()
        recipe, on_cpu = self.recipe, device().type == "cpu"
        if on_cpu:
            machine.keep_freed_memory()
        quantized = bool(self.adapter and recipe and recipe.tuning.method == "qlora")
        stored = "float32" if on_cpu else str(self.base_config.get("dtype") or "float32").removeprefix("torch.")
        of_weights = dtype_named(dtype or stored)
        if dtype is None and self.adapter and recipe and (quantized or not on_cpu):
            of_weights = machine.dtype_of_base(recipe)
        model = self.load_weights(of_weights, place="quantized" if quantized else "device").eval()
        if self.adapter is not None:
            # Imported here: PEFT takes seconds, and bases and full weights do without.
            from pi_lora.models.adapter import load_adapter

            model = load_adapter(model, self.adapter)
        in_float32 = dtype is None and of_weights == torch.float32
        autocast = recipe is not None and in_float32 and machine.measured_under_autocast(recipe)
        if autocast:
            # Without a cache, which would hold all weights a second time.
            model.forward = torch.autocast(model.device.type, torch.bfloat16, cache_enabled=False)(model.forward)
        return self.changed(model=model, autocast=autocast)

    def load_weights(
        self, dtype: torch.dtype, attention: str = machine.SDPA, place: Placement = "device"
    ) -> PreTrainedModel:
        """Return the base with its weights under `config`, without an adapter; see `read_weights`."""
        config, trust = config_of(self.kind, self.config), self.permissions.trust_remote_code
        if place == "empty":
            return empty_weights(config, dtype, attention, trust)
        source = {"revision": self.revision, "trust_remote_code": trust}
        return read_weights(self.base, self.path, config, dtype, attention, place, **source)

    def changed(self, **fields: Any) -> "Model":
        """Return a copy with other fields, that goes on to use the tokenizer and meta_model."""
        other = copy(self)
        vars(other).update(fields)
        return other


def find(
    name: str,
    extension: Extension | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    revision: str = "main",
    base: str | None = None,
) -> Model:
    """Find a hub id, a folder of full weights, `builtin:tiny`, or a run or adapter folder with its own scaling, whose
    base may have moved to `base`.
    """
    if folder := adapter_folder(name, revision):
        if extension is not None:
            raise ModelError(
                f"{name}: brings its own scaling; "
                "leave out --original, --target and --scaling (in a recipe: scaling: keep), or merge it first"
            )
        adapter = find_adapter(folder, base, permissions)
        adapter.name = name
        return adapter
    model = _find_base(name, revision, permissions)
    return model.extended(extension) if extension else model


def find_to_tune(recipe: Recipe, permissions: Permissions = NO_PERMISSIONS) -> Model:
    """Find the model of `recipe`, extended as it says, or as it is under `scaling: keep`."""
    name, context, revision = recipe.model.name, recipe.context, recipe.model.revision
    if recipe.scaling != "keep":
        extension = Extension(context.target, context.original, recipe.scaling, context.theta)
        return find(name, extension, permissions, revision)
    model = find(name, permissions=permissions, revision=revision)
    check_reach(name, model.config, context.target)
    return model


def load(
    name: str,
    extension: Extension | None = None,
    dtype: str | None = None,
    permissions: Permissions = NO_PERMISSIONS,
    base: str | None = None,
) -> Model:
    """Load a model with its scaling, ready to be measured. It has a `model`, a `tokenizer`, the `window` in tokens and
    the `scale` L'/L.

    Args:
        name: A hub id, a folder of full weights, `builtin:tiny`, or the folder of a run or adapter, which brings its
            own scaling.
        extension: How to extend a plain base that was not tuned, such as `Extension(target=16384)`.
        dtype: `float32`, `bfloat16` or `float16`; by default as stored on a GPU, float32 on a CPU, and bfloat16 after
            QLoRA.
        permissions: Whether a model's own code may run, and a run be used whose base or data changed.
        base: Where the base of a run or adapter is now, if it moved.

    Raises:
        ModelError: The model is missing, incomplete or not the one that a run was tuned from.
        ScalingError: Its positions cannot be interpolated.
    """
    return find(name, extension, permissions, base=base).load(dtype)


def adapter_folder(name: str, revision: str = "main") -> Path | None:
    """Return the folder of an adapter, downloaded if `name` is a hub id; None if it is another kind of model."""
    if (Path(name) / ADAPTER_CONFIG_FILE).is_file():
        return Path(name)
    check_finished(Path(name))
    if "/" not in name or is_local(name) or not find_file(name, ADAPTER_CONFIG_FILE, revision):
        return None
    return _downloaded(name, revision)


def run_folder(name: str) -> Path:
    """Return the folder of a run; of a hub id the one in the cache, with its scores."""
    return Path(name) if is_local(name) or not find_file(name, RECIPE_FILE) else _downloaded(name)


def _downloaded(name: str, revision: str = "main") -> Path:
    """Return the folder in the cache of the hub with the files of a run, but full weights and pictures."""
    return Path(snapshot_download(name, revision=revision, allow_patterns=FILES_OF_RUNS))


def find_adapter(folder: Path, base: str | None = None, permissions: Permissions = NO_PERMISSIONS) -> Model:
    """Find an adapter with its base (the one it names, or another `base`) and the config that it was tuned under; raise
    ModelError if base and config disagree.
    """
    config, model = read_config(folder), find_base_of(folder, base, permissions)
    own = model.config
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    sizes = {key: (own.get(key), config.get(key)) for key in keys}
    if method_of(config) != "theta":
        sizes["rope_theta"] = tuple(full_attention_rope(each)["rope_theta"] for each in (own, config))
    differing = [f"{key} {has} instead of {expected}" for key, (has, expected) in sizes.items() if has != expected]
    if not is_extension_of(config, own):
        differing.append(f"its own scale {model.scale:g} does not lead to {scale_of(config):g}")
    if differing:
        raise ModelError(f"{folder}: was not tuned from {model.base}: {'; '.join(differing)}; name its own base")
    return model.changed(name=str(folder), adapter=folder, config=config)


def find_base_of(folder: Path, base: str | None = None, permissions: Permissions = NO_PERMISSIONS) -> Model:
    """Find the base that an adapter folder names, or another `base`; raise ModelError if there is neither."""
    if base:
        return _find_base(base, permissions=permissions)
    adapter, known = read_adapter_settings(folder), Run(folder).metadata.origin
    if not (name := adapter.base_model_name_or_path):
        raise ModelError(
            f"{folder / ADAPTER_CONFIG_FILE}: base_model_name_or_path: is missing; "
            "name the base there, or with --base MODEL"
        )
    revision = adapter.revision or "main"
    if known and (known.commit or (known.place and Path(known.place).exists())):
        # Where it was then: a relative path means another folder from elsewhere, and branches move.
        model = _find_base(known.place or name, known.commit or revision, permissions)
        model.base = name
        return model
    if known and known.place and not Path(name).exists():
        raise ModelError(f"{folder}: its base is no longer in {known.place}; say where it is with --base MODEL")
    return _find_base(name, revision, permissions)


def own_entries(config: PreTrainedConfig) -> Config:
    """Return a config as a dictionary, without common defaults and the path it was read from."""
    common = PreTrainedConfig(name_or_path=config.name_or_path).to_dict()
    return {key: value for key, value in config.to_dict().items() if key not in common or common[key] != value}


def _find_base(name: str, revision: str = "main", permissions: Permissions = NO_PERMISSIONS) -> Model:
    path = locate(name)
    with readable(name, CONFIG_FILE), quiet_loading():
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=permissions.trust_remote_code)
    own = own_entries(config)
    for kind, code in own.get("auto_map", {}).items():
        if isinstance(code, str) and "--" not in code:
            # As transformers marks code on the hub: whatever is made from this config finds it.
            own["auto_map"][kind] = f"{Path(path).resolve()}--{code}"
    if full_attention_rope(own).get("rope_type") == "linear":
        file = find_file(path, SETTINGS_FILE, revision)
        settings = read_json(file, Json, "download it again") if file else {}
        own = normalize_max_positions(own, settings.get("model_max_length"))
    return Model(name, name, path, revision, permissions, type(config), own, with_legacy_rope_keys(own))
