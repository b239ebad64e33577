"""The models that users name, resolved: hub ids, folders, built-in models, runs and adapters."""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pi_lora.errors import ModelError, ScalingError, first_line
from pi_lora.hub import download_file, tensors_on_hub
from pi_lora.model_ref import ModelRef
from pi_lora.models.files import (
    ADAPTER_CONFIG_FILE,
    BUILTIN,
    BUILTIN_FOLDER,
    CONFIG_FILE,
    SETTINGS_FILE,
    WARNING,
    find_file,
    is_local,
    model_folder,
    read_adapter_settings,
    read_config,
    readable,
)
from pi_lora.models.shape import Shape
from pi_lora.models.source import Base, ModelSource
from pi_lora.recipe.files import RECIPE_FILE
from pi_lora.recipe.schema import Recipe
from pi_lora.run import Run, is_checkpoint
from pi_lora.scaling.config import (
    COMPOSITE,
    OUTER_ENTRIES,
    STORED_ENTRIES,
    TEXT_CONFIG,
    Config,
    full_attention_rope,
    language_config,
    whole_config,
    with_legacy_rope_keys,
)
from pi_lora.scaling.extension import Extension, check_reach
from pi_lora.scaling.model_types import facts_of
from pi_lora.scaling.rope import Rope, normalize_max_positions
from pi_lora.staging import check_finished, staging_path
from pi_lora.storage import read_json
from pi_lora.types import NO_PERMISSIONS, Json, Permissions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Config and shape of the hub models that recipes and docs/choosing.md name: planned offline and without torch.
SHIPPED_CONFIGS = Path(__file__).parent / "configs"
SHAPE_FILE = "shape.json"
# Config entries that an adapter and its base have in common.
COMMON_ENTRIES = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# The end of the name of most heads.
HEAD = "lm_head.weight"
# As in the first configs of Phi-3. transformers 5.23 gives it the new name after the other entries were refused.
OLD_LONGROPE = "su"
# Config entries that an extension changes.
WINDOW_ENTRIES = ("max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta")


def resolve_model(
    model: str | os.PathLike[str],
    *,
    commit: str | None = None,
    shipped: bool = False,
) -> ModelSource:
    """Resolve a hub id, a folder of full weights, `builtin:tiny`, or a run or adapter.

    Args:
        model: The model as the user names it: a `ModelRef`, or its name alone.
        commit: The commit of the base, if it is known; otherwise that of the revision.
        shipped: Take config and shape of a model that a recipe names from the package, which is enough for a plan.

    Raises:
        ModelError: The model is missing, incomplete, or not the one that an adapter was tuned from.
        ScalingError: The model cannot be extended.
    """
    ref = ModelRef.of(model)
    name = os.fspath(ref)
    permissions = ref.permissions
    shipped_base = _shipped_base(name, ref.revision) if shipped else None
    if shipped_base is None:
        check_finished(Path(name))
        folder, found_commit = model_folder(name, ref.revision)
        if (folder / ADAPTER_CONFIG_FILE).is_file():
            if ref.extension:
                raise ModelError(
                    f"{name}: is extended already; "
                    "leave out --original, --target and --scaling (in a recipe: scaling: keep), or merge it first"
                )
            base = os.fspath(ref.base) if ref.base else None
            resolved_base = _base_of_adapter(folder, base, permissions, commit)
            return replace(_resolve_adapter(name, folder, resolved_base), dtype=ref.dtype)
    resolved_base = shipped_base or _resolve_base(name, commit or found_commit, permissions)
    source = ModelSource(name, resolved_base, with_legacy_rope_keys(resolved_base.config), dtype=ref.dtype)
    return source.extended(ref.extension) if ref.extension else source


def resolve_for_training(
    recipe: Recipe, *, permissions: Permissions = NO_PERMISSIONS, resumed: Path | None = None, shipped: bool = False
) -> ModelSource:
    """Resolve the model of `recipe`, extended as the recipe says, or as it is under `scaling: keep`. The interrupted
    run of the output `resumed` continues at the commit of the base that it began with.
    """
    model = ModelRef(
        recipe.model.name,
        revision=recipe.model.revision,
        extension=extension_of(recipe),
        **vars(permissions),
    )
    commit = Run(staging_path(resumed)).commit if resumed else None
    source = resolve_model(model, commit=commit, shipped=shipped)
    if recipe.scaling == "keep":
        check_reach(recipe.model.name, source.rope, recipe.context.target)
    return source


def extension_of(recipe: Recipe) -> Extension | None:
    """Return the extension that a recipe describes; None under `scaling: keep`."""
    if recipe.scaling == "keep":
        return None
    context = recipe.context
    divisors = context.factors.model_dump() if context.factors else {}
    return Extension(context.target, original=context.original, scaling=recipe.scaling, theta=context.theta, **divisors)


def run_folder(name: str) -> Path:
    """Return the folder of a run; of a hub id the one in the cache, with its scores. Raise ModelError if there is
    none.
    """
    check_finished(Path(name))
    folder, _ = model_folder(name)
    return folder if (folder / RECIPE_FILE).is_file() else Path(name)


def _base_of_adapter(folder: Path, base: str | None, permissions: Permissions, commit: str | None) -> Base:
    """Resolve the base that an adapter folder names, or another `base`; raise ModelError if there is neither. `commit`
    is that of the base if the adapter does not record it.
    """
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
    base_path = recorded.path if recorded and recorded.path else name
    if is_local(base_path) and not name.startswith(BUILTIN) and not Path(name).expanduser().exists():
        raise ModelError(f"{folder}: its base is no longer in {base_path}; say where it is with --base MODEL")
    return _resolve_base(name, commit or revision, permissions)


def own_entries(config: "PreTrainedConfig") -> Json:
    """Return a config as a dictionary, without common defaults and the path it was read from."""
    from transformers import PreTrainedConfig

    common = PreTrainedConfig(name_or_path=config.name_or_path).to_dict()
    own = {}
    for key, value in config.to_dict().items():
        if key not in common or common[key] != value:
            own[key] = value
    return own


def _completed(config: "PreTrainedConfig", stored: Config) -> Json:
    """Return the config of a language model as transformers completes what is `stored`; other parts of a composite are
    kept as they are stored.
    """
    own = own_entries(config)
    if TEXT_CONFIG in own:
        outer = {key: entry for key, entry in own.items() if key in OUTER_ENTRIES}
        text = own_entries(config.get_text_config())
        # Some publish the entries of the language model beside the towers as well, or only there (Qwen2.5-VL).
        moved = {*OUTER_ENTRIES, *WINDOW_ENTRIES}
        if TEXT_CONFIG not in stored:
            moved |= text.keys() - {"model_type"}
        others = {key: entry for key, entry in stored.items() if key not in moved}
        own = language_config({**others, **outer, TEXT_CONFIG: text})
    if "num_local_experts" in own:
        # The name by which transformers 4 reads Qwen 3's, and TRL 1.16 all.
        own["num_experts"] = own["num_local_experts"]
    if not own.get("quantization_config"):
        own.pop("quantization_config", None)
    return own


def _check_theta(folder: Path, config: Json) -> None:
    """Raise ScalingError if transformers 5 does not take the theta of a config to which a `rope_scaling` was added: it
    looks for theta there and at the top level.
    """
    stored = read_config(folder)
    computed = Rope(config).parameters["rope_theta"]
    if not (stored.get("rope_parameters") or {}).get("rope_theta"):
        return
    theta = Rope(stored).parameters["rope_theta"]
    if theta != computed:
        raise ScalingError(
            f"{folder / CONFIG_FILE}: transformers takes rope_theta {computed:g}, not the {theta:g} in "
            "rope_parameters, beside rope_scaling; write rope_theta into rope_scaling too"
        )


def shipped_folder(name: str) -> Path:
    """Return the folder where the config and shape of a hub or built-in model are shipped, if they are."""
    if name.startswith(BUILTIN):
        return BUILTIN_FOLDER / name.removeprefix(BUILTIN)
    return SHIPPED_CONFIGS / name.replace("/", "--")


def _shipped_base(name: str, revision: str) -> Base | None:
    """Return the base of a shipped config and shape, or None. Other revisions than `main` may have another shape."""
    folder = shipped_folder(name)
    shape_file = folder / SHAPE_FILE
    if revision != "main" or os.path.isdir(name) or not shape_file.is_file():
        return None
    return Base(
        name=name,
        path=folder,
        commit=None,
        permissions=NO_PERMISSIONS,
        config=read_config(folder),
        shipped_shape=read_json(shape_file, Shape, "install pi-lora again"),
    )


def _resolve_adapter(name: str, folder: Path, base: Base) -> ModelSource:
    """Return an adapter under the config that it was tuned under; raise ModelError if base and config disagree."""
    config = _config_of_adapter(folder, base)
    _check_fits(folder, config, base)
    # Whatever the adapter was trained on.
    for key in STORED_ENTRIES:
        config.pop(key, None)
        if key in base.config:
            config[key] = base.config[key]
    source = ModelSource(name, base, config, adapter=folder)
    if Rope(config).method is None and not source.needs_own_config:
        remedy = "name the run, or bring back the file that the training wrote"
        if WARNING in (read_adapter_settings(folder).model_extra or {}):
            raise ModelError(
                f"{folder / CONFIG_FILE}: is that of the base, and the adapter was tuned under a scaling; {remedy}"
            )
        if is_checkpoint(folder) and not base.permissions.allow_mismatch:
            raise ModelError(
                f"{folder / CONFIG_FILE}: is that of the base, and a checkpoint does not tell the scaling of its "
                f"adapter; {remedy}, or use this one with --allow-mismatch if no scaling was tuned"
            )
    return source


def _check_fits(folder: Path, config: Config, base: Base) -> None:
    """Raise ModelError if the config of an adapter and that of the base are of different models."""
    base_config = with_legacy_rope_keys(base.config)
    rope = Rope(config)
    base_rope = Rope(base_config)
    base_entries = _common_entries(base_config)
    adapter_entries = _common_entries(config)
    if rope.method == "theta":
        del base_entries["rope_theta"]
    unstated = _unstated(folder, base)
    defaults = _unstated(base.path, base)
    differing = {}
    missing = []
    for key, entry in base_entries.items():
        if entry == adapter_entries[key]:
            continue
        if key in unstated:
            missing.append(key)
        else:
            default = " (a default, which its config.json does not state)" if key in defaults else ""
            differing[key] = f"{key} {entry}{default} instead of {adapter_entries[key]}"
    if missing:
        raise ModelError(
            f"{folder / CONFIG_FILE}: has no {', '.join(missing)}; add the numbers of the model that was tuned"
        )
    if not rope.extends(base_rope):
        differing["scale"] = f"its own scale {base_rope.scale:g} does not lead to {rope.scale:g}"
    if differing:
        differences = "; ".join(differing.values())
        raise ModelError(f"{folder}: does not fit {base.name}: {differences}; {_remedy(*differing)}")


def _remedy(*differing: str) -> str:
    """Return what to do about the entries in which an adapter and a base differ."""
    if differing == ("vocab_size",):
        return (
            "resize the embeddings of the base (resize_token_embeddings) and save it, or name the base with the "
            "vocabulary of the adapter"
        )
    if differing == ("scale",):
        return f"name the base without this scaling, or bring back the {CONFIG_FILE} of the model that was tuned"
    return f"name its own base, or correct {CONFIG_FILE} if it is not that of the model that was tuned"


def _unstated(folder: Path, base: Base) -> set[str]:
    """Return the common entries that the config of an adapter or base has under no name, so transformers fills in."""
    stored = read_config(folder)
    stated = {*stored}
    for key in ("rope_parameters", "rope_scaling"):
        rope = stored.get(key) or {}
        stated |= {*rope}
        for part in rope.values():
            if isinstance(part, dict):
                stated |= {*part}
    other_names = base.config_class.attribute_map | facts_of(base.config["model_type"]).names_in_4
    entries = (*COMMON_ENTRIES, "rope_theta")
    return {key for key in entries if key not in stated and other_names.get(key) not in stated}


def _config_of_adapter(folder: Path, base: Base) -> Json:
    """Return the config that an adapter was tuned under, completed as that of its base: other tools write what their
    version of transformers does, and users copy the file of the base.
    """
    from pi_lora.models.quiet import quiet_loading
    from pi_lora.scaling.verify import config_of

    stored = read_config(folder)
    model_type = stored.get("model_type")
    # As of all plain models, and of composites whose config of transformers 4 has no part for the language model.
    of_whole = model_type == base.config_class.model_type
    if COMPOSITE in base.config and COMPOSITE not in stored and not of_whole:
        # Of an adapter of the language model alone.
        stored[COMPOSITE] = base.config[COMPOSITE]
    with readable(folder, CONFIG_FILE), quiet_loading():
        config = _completed(config_of(base.config_class, stored), whole_config(stored))
    if model_type and not of_whole:
        config["model_type"] = model_type
    is_unextended = full_attention_rope(config) == base.rope.parameters
    if is_unextended and config.get("max_position_embeddings") == base.rope.window:
        # Of a base that declares its extended window, see `normalize_max_positions`.
        config["max_position_embeddings"] = base.config["max_position_embeddings"]
    return with_legacy_rope_keys(config)


def _common_entries(config: Config) -> Json:
    entries = {key: config.get(key) for key in COMMON_ENTRIES}
    return {**entries, "rope_theta": full_attention_rope(config)["rope_theta"]}


def _resolve_base(name: str, revision: str | None, permissions: Permissions) -> Base:
    from transformers import AutoConfig

    from pi_lora.models.code import MODEL, load_classes, name_of, path_for_code, register
    from pi_lora.models.composite import language_class
    from pi_lora.models.quiet import quiet_loading

    folder, commit = model_folder(name, revision or "main")
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        raise ModelError(f"{name}: is an adapter and no base; merge it (pi-lora merge), and name the merged model")
    trust = permissions.trust_remote_code
    path = path_for_code(name, folder, commit) if trust else str(folder)
    with readable(name, CONFIG_FILE):
        stored = read_json(folder / CONFIG_FILE, Json, "download it again")
        has_old_name = (stored.get("rope_scaling") or {}).get("type") == OLD_LONGROPE
    if has_old_name and not trust:
        raise ScalingError(
            f"{name}: {CONFIG_FILE}: rope_scaling.type: transformers 5 does not read {OLD_LONGROPE}, the old name of "
            "longrope; write longrope, of a model on the hub in a copy here"
        )
    with readable(name, CONFIG_FILE), quiet_loading():
        config = AutoConfig.from_pretrained(path, revision=commit, trust_remote_code=trust)
        own = _completed(config, stored)
        config_class = type(config)
        language = language_class(config)
        auto_map = own.pop("auto_map", {})
        code = load_classes(auto_map, path, commit) if trust else {}
        if MODEL in code:
            config_class = register(code[MODEL], config_class)
            own["auto_map"] = {key: name_of(kind) for key, kind in code.items()}
        elif language:
            config_class = register(language, config_class)
    if MODEL not in code:
        _check_causal(name, config, language)
    _check_theta(folder, own)
    _check_generation_config(folder)
    if Rope(own).rope_type == "linear":
        settings_file = find_file(folder, SETTINGS_FILE)
        settings = read_json(settings_file, Json, "download it again") if settings_file else {}
        own = normalize_max_positions(own, settings.get("model_max_length"))
    if own.get("tie_word_embeddings") and _stores_another_head(name, folder, commit):
        own["tie_word_embeddings"] = False
    return Base(
        name=name,
        path=folder,
        commit=commit,
        permissions=permissions,
        config=own,
        config_class=config_class,
        code=code,
    )


def _check_causal(name: str, config: "PreTrainedConfig", language: type | None) -> None:
    """Raise ModelError if transformers has no causal language model for a config, or that `language` is none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    builds = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or language
    if not builds or facts_of(config.model_type).sees_later_tokens:
        raise ModelError(
            f"{name}: transformers has no model of type {config.model_type} that predicts the next token of a text; "
            "choose another"
        )


def _check_generation_config(folder: Path) -> None:
    """Raise ModelError if transformers refuses the generation config, without which it loads no weights."""
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    from pi_lora.models.quiet import quiet_loading

    try:
        with quiet_loading():
            GenerationConfig.from_pretrained(folder)
    except OSError:  # no file, or no JSON: transformers takes the tokens of config.json
        pass
    except Exception as error:  # any, of values of any type
        file = folder / GENERATION_CONFIG_NAME
        raise ModelError(f"{file}: is refused by transformers ({first_line(error)}); correct it") from None


def _stores_another_head(name: str, folder: Path, commit: str | None) -> bool:
    """Whether the weights hold a head that is not the embeddings, under the names that most models use.

    The same files decide before and after a download, or a resumed run would have another structure: of several files
    the index alone, where transformers lists no tied head; a single file by its numbers. A single file on the hub is
    downloaded if it holds a head.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    from pi_lora.models.weights import read_header, read_index

    index = find_file(folder, SAFE_WEIGHTS_INDEX_NAME)
    single_file = find_file(folder, SAFE_WEIGHTS_NAME)
    if index and not single_file:
        return any(tensor.endswith(HEAD) for tensor in read_index(index))
    # A single file that is missing or damaged is reported when it is read.
    with suppress(ModelError, StopIteration):
        if commit and not single_file:
            next(tensor for tensor in tensors_on_hub(name, commit) if tensor.endswith(HEAD))
            single_file = download_file(name, SAFE_WEIGHTS_NAME, commit)
        weights = read_header(single_file or folder / SAFE_WEIGHTS_NAME)
        head = next(weights[tensor] for tensor in weights if tensor.endswith(HEAD))
        embeddings = next(weights[tensor] for tensor in weights if tensor.endswith("embed_tokens.weight"))
        return not head.equals(embeddings)
    return False
