"""Models as users name them, resolved: the base at one commit, its config, and the adapter or extension on it.

`resolve_model` makes a `ModelSource` once for each command. Planning, packing, checks and merging work on it; nothing
there reads weights. torch and transformers are imported where they are used: a plan of a shipped model does without.
"""

import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download

from pi_lora.errors import ModelError
from pi_lora.models.files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    BUILTIN,
    BUILTIN_FOLDER,
    CONFIG_FILE,
    SETTINGS_FILE,
    TOKENIZER_FILES,
    find_file,
    is_local,
    locate,
    read_adapter_settings,
    read_config,
    readable,
)
from pi_lora.models.shape import Shape
from pi_lora.recipe.files import RECIPE_FILE
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Fingerprint, Run, check_finished
from pi_lora.scaling.config import (
    Config,
    Extension,
    check_extendable,
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
from pi_lora.storage import read_json
from pi_lora.types import NO_PERMISSIONS, Json, Permissions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FILES_OF_RUNS = ["*.json", "*.yaml", ADAPTER_WEIGHTS_FILE, *TOKENIZER_FILES]
# Config and shape of the hub models that the recipes name, so that these are planned offline and without torch.
SHIPPED_CONFIGS = Path(__file__).parent / "configs"
SHAPE_FILE = "shape.json"
# Config entries that an adapter and its base have in common.
COMMON_ENTRIES = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Base:
    """A model with all weights, at one commit.

    Attributes:
        name: The hub id, folder or built-in model, as the user or an adapter names it.
        path: The folder or hub id that files are read from.
        revision: The commit of a hub id.
        permissions: Whether code of the model may run.
        config: The config as transformers completes it.
        config_class: The class of the config in transformers; None of a shipped config, which only plans read.
        shipped_shape: The shape that is shipped with the config.
    """

    name: str
    path: str
    revision: str
    permissions: Permissions
    config: Config
    config_class: "type[PreTrainedConfig] | None" = None
    shipped_shape: Shape | None = None

    def file(self, name: str) -> Path | None:
        """Return a file, downloaded from the hub if necessary, or None if the model has no such file."""
        return find_file(self.path, name, self.revision)

    @property
    def is_local(self) -> bool:
        """Whether the files are in a folder rather than on the hub."""
        return os.path.isdir(self.path)

    @cached_property
    def folder(self) -> Path:
        """The folder of the files: in the cache of the hub, that of the commit."""
        config = self.file(CONFIG_FILE)
        assert config, "a base is resolved by its config"
        return config.parent

    @cached_property
    def meta_model(self) -> "PreTrainedModel":
        """The unextended model on the meta device: every module with its shape, no memory for weights."""
        from pi_lora.models.quiet import quiet_loading
        from pi_lora.scaling.verify import build_on_meta

        assert self.config_class, "shipped configs are for plans"
        with quiet_loading():
            return build_on_meta(self.config_class, self.config, self.permissions.trust_remote_code)

    @cached_property
    def shape(self) -> Shape:
        """The shape from which memory and hours are planned; ModelError for a model without decoder layers."""
        if self.shipped_shape:
            return self.shipped_shape
        from pi_lora.models.shape import shape_of

        return shape_of(self.meta_model)

    @cached_property
    def weights_digest(self) -> str:
        """A digest of the weights."""
        from pi_lora.models.weights import weights_digest

        return weights_digest(self.file)

    def fingerprint(self, tokenizer: str, data: str) -> Fingerprint:
        """Return the fingerprint of a run of this base, from the digests of its tokenizer and data."""
        hub_commit = None if self.is_local else self.revision
        has_path = self.is_local and not self.name.startswith(BUILTIN)
        return Fingerprint(
            path=str(Path(self.path).resolve()) if has_path else None,
            commit=hub_commit,
            weights=self.weights_digest,
            tokenizer=tokenizer,
            data=data,
        )

    def is_base_of(self, run: Run) -> bool:
        """Whether a run was tuned from these weights; True for a run without a fingerprint."""
        recorded = run.metadata.origin
        if recorded is None:
            return True
        if recorded.commit and not self.is_local and recorded.commit == self.revision:
            return True
        return recorded.weights == self.weights_digest


@dataclass(frozen=True)
class ModelSource:
    """A base, or a base with an adapter or an extension, before any weights are read.

    Attributes:
        name: The model as the user names it.
        base: The base, at one commit.
        config: The config that the model is loaded under, with the keys of transformers 4 and 5.
        adapter: The folder of an adapter of the base, if the model is one.
        extension: How the base is extended, if that was asked for.
    """

    name: str
    base: Base
    config: Config
    adapter: Path | None = None
    extension: Extension | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.window:,} tokens, scale {self.scale:g}"

    @property
    def window(self) -> int:
        """The context window in tokens."""
        return window_of(self.config)

    @property
    def scale(self) -> float:
        """The factor L'/L by which the window is extended; under `pi` positions are divided by it."""
        return scale_of(self.config)

    @property
    def original(self) -> int:
        """The window L before the extension, in tokens."""
        if self.extension:
            return self.extension.original_of(self.base.config)
        # A config does not say by how much `direct` extended it.
        return self.run.metadata.original or round(self.window / self.scale)

    @property
    def permissions(self) -> Permissions:
        """The permissions that the user gives."""
        return self.base.permissions

    @property
    def shape(self) -> Shape:
        """The shape of the base."""
        return self.base.shape

    @property
    def needs_own_config(self) -> bool:
        """Whether the base would be unscaled under the config of the base."""
        return read_rope(self.config) != read_rope(self.base.config)

    @cached_property
    def run(self) -> Run:
        """The folder of the run: of the adapter, or of fully tuned weights."""
        return Run(self.adapter or Path(self.name))

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe that the model was tuned by, if it is a run."""
        return self.run.recipe if self.run.has_recipe else None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the run, or of the base."""
        from pi_lora.models.tokenizer import load_tokenizer

        path: str | Path = self.base.path
        # Adapters made elsewhere may have no tokenizer.
        if self.adapter and (self.adapter / SETTINGS_FILE).is_file():
            path = self.adapter
        return load_tokenizer(
            path,
            window=self.window,
            revision=self.base.revision,
            trust_remote_code=self.permissions.trust_remote_code,
            vocabulary=self.config.get("vocab_size"),
        )

    @property
    def typed_config(self) -> "PreTrainedConfig":
        """The config as an object of transformers."""
        from pi_lora.scaling.verify import config_of

        assert self.base.config_class, "shipped configs are for plans"
        return config_of(self.base.config_class, self.config)

    def extended(self, extension: Extension) -> "ModelSource":
        """Return this base extended; raise ScalingError if that is impossible, or transformers does not apply it."""
        if self.base.config_class is None:
            check_extendable(self.base.config, extension)
            return replace(self, config=extend_config(self.base.config, extension), extension=extension)
        from pi_lora.models.quiet import quiet_loading
        from pi_lora.scaling.verify import check_scaling

        config = extend_config(self.base.config, extension)
        if extension.scaling != "direct":
            with quiet_loading():
                trust = self.permissions.trust_remote_code
                check_scaling(self.base.meta_model, self.base.config, extension, trust)
        return replace(self, config=config, extension=extension)

    def check_base_fingerprint(self) -> None:
        """Raise ModelError if the weights of the base are not those that the adapter was tuned on."""
        if self.adapter is None or self.permissions.allow_mismatch:
            return
        if not self.base.is_base_of(self.run):
            raise ModelError(
                f"{self.adapter}: {self.base.name} ({self.base.folder}) has other weights than those that it was tuned "
                "on; bring them back, or use these with --allow-mismatch"
            )


def resolve_model(
    name: str,
    extension: Extension | None = None,
    *,
    permissions: Permissions = NO_PERMISSIONS,
    revision: str = "main",
    base: str | None = None,
    shipped: bool = False,
) -> ModelSource:
    """Resolve a hub id, a folder of full weights, `builtin:tiny`, or a run or adapter.

    Args:
        name: The model as the user names it.
        extension: How to extend a plain base; a run is extended as its config says.
        permissions: Whether code of the model may run, and a run be used whose base changed.
        revision: The branch, tag or commit of a hub id; all files are read at one commit of it.
        base: The base of a run or adapter, if it moved.
        shipped: Take config and shape of a model that a recipe names from the package, which is enough for a plan.

    Raises:
        ModelError: The model is missing, incomplete, or not the one that an adapter was tuned from.
        ScalingError: The model cannot be extended.
    """
    shipped_base = _shipped_base(name, revision) if shipped else None
    if shipped_base:
        source = ModelSource(name, shipped_base, shipped_base.config)
        return source.extended(extension) if extension else source
    folder = adapter_folder(name, revision)
    if folder:
        if extension is not None:
            raise ModelError(
                f"{name}: brings its own scaling; "
                "leave out --original, --target and --scaling (in a recipe: scaling: keep), or merge it first"
            )
        resolved_base = base_of_adapter(folder, base, permissions)
        return _resolve_adapter(name, folder, resolved_base)
    resolved_base = _resolve_base(name, revision, permissions)
    source = ModelSource(name, resolved_base, with_legacy_rope_keys(resolved_base.config))
    return source.extended(extension) if extension else source


def resolve_for_training(
    recipe: Recipe, *, permissions: Permissions = NO_PERMISSIONS, shipped: bool = False
) -> ModelSource:
    """Resolve the model of `recipe`, extended as the recipe says, or as it is under `scaling: keep`."""
    context = recipe.context
    extension = None
    if recipe.scaling != "keep":
        extension = Extension(
            context.target,
            original=context.original,
            scaling=recipe.scaling,
            theta=context.theta,
        )
    source = resolve_model(
        recipe.model.name,
        extension,
        permissions=permissions,
        revision=recipe.model.revision,
        shipped=shipped,
    )
    if recipe.scaling == "keep":
        check_reach(recipe.model.name, source.config, context.target)
    return source


def adapter_folder(name: str, revision: str = "main") -> Path | None:
    """Return the folder of an adapter, downloaded if `name` is a hub id; None if it is another kind of model."""
    if (Path(name) / ADAPTER_CONFIG_FILE).is_file():
        return Path(name)
    check_finished(Path(name))
    if "/" not in name or is_local(name):
        return None
    settings = find_file(name, ADAPTER_CONFIG_FILE, revision)
    return _downloaded_run(name, settings) if settings else None


def require_adapter(name: str, adapter: Path | None) -> Path:
    """Return the folder of the adapter of the model `name`; raise ModelError if the model is no adapter."""
    if adapter is None:
        raise ModelError(f"{name}: holds no adapter; name a run of lora tuning (full tuning needs no merge)")
    return adapter


def run_folder(name: str) -> Path:
    """Return the folder of a run; of a hub id the one in the cache, with its scores."""
    if is_local(name):
        return Path(name)
    recipe = find_file(name, RECIPE_FILE)
    return _downloaded_run(name, recipe) if recipe else Path(name)


def _downloaded_run(name: str, file: Path) -> Path:
    """Return the folder in the cache of the hub with the files of a run, without full weights and pictures.

    The files are those of the commit that `file` was downloaded from: the cache has a folder for each commit.
    """
    commit = file.parent.name
    return Path(snapshot_download(name, revision=commit, allow_patterns=FILES_OF_RUNS))


def base_of_adapter(folder: Path, base: str | None = None, permissions: Permissions = NO_PERMISSIONS) -> Base:
    """Resolve the base that an adapter folder names, or another `base`; raise ModelError if there is neither."""
    if base:
        return _resolve_base(base, "main", permissions)
    settings = read_adapter_settings(folder)
    recorded = Run(folder).metadata.origin
    name = settings.base_model_name_or_path
    if not name:
        raise ModelError(
            f"{folder / ADAPTER_CONFIG_FILE}: base_model_name_or_path: is missing; "
            "name the base there, or with --base MODEL"
        )
    revision = settings.revision or "main"
    if recorded and (recorded.commit or (recorded.path and Path(recorded.path).exists())):
        # As recorded by the training: a relative path means another folder from elsewhere, and branches move.
        resolved = _resolve_base(recorded.path or name, recorded.commit or revision, permissions)
        return replace(resolved, name=name)
    if recorded and recorded.path and not Path(name).exists():
        raise ModelError(f"{folder}: its base is no longer in {recorded.path}; say where it is with --base MODEL")
    return _resolve_base(name, revision, permissions)


def own_entries(config: "PreTrainedConfig") -> Config:
    """Return a config as a dictionary, without common defaults and the path it was read from."""
    from transformers import PreTrainedConfig

    common = PreTrainedConfig(name_or_path=config.name_or_path).to_dict()
    own = {}
    for key, value in config.to_dict().items():
        if key not in common or common[key] != value:
            own[key] = value
    return own


def shipped_folder(name: str) -> Path:
    """Return the folder where the config and shape of a hub or built-in model are shipped, if they are."""
    if name.startswith(BUILTIN):
        return BUILTIN_FOLDER / name.removeprefix(BUILTIN)
    return SHIPPED_CONFIGS / name.replace("/", "--")


def _shipped_base(name: str, revision: str) -> Base | None:
    """Return the base of a shipped config and shape, or None. Other revisions than `main` may have another shape."""
    folder = shipped_folder(name)
    if revision != "main" or os.path.isdir(name) or not (folder / SHAPE_FILE).is_file():
        return None
    config = json.loads((folder / CONFIG_FILE).read_bytes())
    shape = Shape(**json.loads((folder / SHAPE_FILE).read_bytes()))
    return Base(
        name=name,
        path=str(folder),
        revision=revision,
        permissions=NO_PERMISSIONS,
        config=config,
        shipped_shape=shape,
    )


def _resolve_adapter(name: str, folder: Path, base: Base) -> ModelSource:
    """Return an adapter under the config that it was tuned under; raise ModelError if base and config disagree."""
    config = read_config(folder)
    base_config = with_legacy_rope_keys(base.config)
    base_entries = {key: base_config.get(key) for key in COMMON_ENTRIES}
    adapter_entries = {key: config.get(key) for key in COMMON_ENTRIES}
    if method_of(config) != "theta":
        base_entries["rope_theta"] = full_attention_rope(base_config)["rope_theta"]
        adapter_entries["rope_theta"] = full_attention_rope(config)["rope_theta"]
    differing = []
    for key, entry in base_entries.items():
        if entry != adapter_entries[key]:
            differing.append(f"{key} {entry} instead of {adapter_entries[key]}")
    if not is_extension_of(config, base_config):
        differing.append(f"its own scale {scale_of(base_config):g} does not lead to {scale_of(config):g}")
    if differing:
        raise ModelError(f"{folder}: was not tuned from {base.name}: {'; '.join(differing)}; name its own base")
    return ModelSource(name, base, config, adapter=folder)


def _resolve_base(name: str, revision: str, permissions: Permissions) -> Base:
    from transformers import AutoConfig

    from pi_lora.models.quiet import quiet_loading

    path = locate(name)
    if not os.path.isdir(path):
        config_file = find_file(path, CONFIG_FILE, revision)
        if config_file:
            revision = config_file.parent.name  # the commit: a push between two reads changes nothing
    with readable(name, CONFIG_FILE), quiet_loading():
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=permissions.trust_remote_code)
    own = own_entries(config)
    for kind, code in own.get("auto_map", {}).items():
        if isinstance(code, str) and "--" not in code:
            # As transformers marks code on the hub: the classes of this config are loaded from there.
            own["auto_map"][kind] = f"{Path(path).resolve()}--{code}"
    if full_attention_rope(own).get("rope_type") == "linear":
        settings_file = find_file(path, SETTINGS_FILE, revision)
        settings = read_json(settings_file, Json, "download it again") if settings_file else {}
        own = normalize_max_positions(own, settings.get("model_max_length"))
    return Base(
        name=name,
        path=path,
        revision=revision,
        permissions=permissions,
        config=own,
        config_class=type(config),
    )
