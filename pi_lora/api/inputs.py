"""The values that users give, as the package takes them: models, paths, dtypes, options, overrides and progress."""

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, Union, Unpack

from pi_lora.errors import PiLoraError
from pi_lora.model_ref import ModelOptions, ModelRef
from pi_lora.types import SILENT, UI, current_ui, showing

if TYPE_CHECKING:
    from pi_lora.models.loaded import LoadedModel
    from pi_lora.models.source import ModelSource
    from pi_lora.recipe.schema import Recipe
    from pi_lora.recipe.section import Section

# Each function imports what it needs: a plan does without torch.

FilePath: TypeAlias = str | Path
# `ModelRef` is a path; a run and a merged model stand for the paths of their folders.
AnyModel: TypeAlias = Union[str, os.PathLike[str], "ModelSource", "LoadedModel"]
Override: TypeAlias = str | Mapping[str, Any]
# A file, a shipped recipe by name, the sections as a mapping, or a recipe that was loaded.
AnyRecipe: TypeAlias = Union[FilePath, Mapping[str, Any], "Recipe"]
SectionT = TypeVar("SectionT", bound="Section")
P = ParamSpec("P")
R = TypeVar("R")
# An option in a message, or a command with all that belongs to it.
OPTION = re.compile(r"pi-lora [^;,()]*|(?<![\w-])--(?P<option>[a-z][a-z-]*[a-z])")
# Arguments of Python whose names are not those of the options of commands.
ARGUMENTS = {
    "again": "force_remeasure=True",
    "allow_mismatch": "allow_mismatch=True",
    "another": "allow_other_base=True",
    "force": "force=True",
    "no_chat_template": "chat_template=False",
    "no_untuned": "include_untuned=False",
    "private": "private=True",
    "resume": "resume=True",
    "tokens": "max_new_tokens",
    "trust_remote_code": "trust_remote_code=True",
}
SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def in_python(text: str) -> str:
    """Return a message with arguments of Python in place of the options of commands; commands in it stay.

    >>> in_python("--data: books: no such file; see pi-lora probe MODEL --data books")
    'data: books: no such file; see pi-lora probe MODEL --data books'
    >>> in_python("it has other weights; --allow-mismatch allows it")
    'it has other weights; allow_mismatch=True allows it'
    """

    def argument(found: re.Match[str]) -> str:
        if not found["option"]:
            return found[0]
        name = found["option"].replace("-", "_")
        return ARGUMENTS.get(name, name)

    return OPTION.sub(argument, text)


@contextmanager
def python_messages() -> Iterator[None]:
    """Name arguments of Python in the messages of errors, unless a command calls."""
    try:
        yield
    except PiLoraError as error:
        if current_ui.get() is SILENT:
            error.args = tuple(map(in_python, error.args))
        raise


@python_messages()
def resolve(model: AnyModel, **options: Unpack[ModelOptions]) -> "ModelSource":
    """Resolve a model without reading weights: window, scale, configs and tokenizer are known.

    Args:
        model: A name, or a `ModelRef`, which holds the options.
        options: The fields of `ModelRef`: `base`, `revision`, `extension`, `dtype`, `trust_remote_code` and
            `allow_mismatch`.

    Raises:
        ModelError: The model is missing, incomplete or not the one that a run was tuned from.
        ScalingError: The model cannot be extended.
    """
    from pi_lora.hub import ask_again
    from pi_lora.models.loaded import LoadedModel
    from pi_lora.models.resolve import resolve_model
    from pi_lora.models.source import ModelSource

    given: dict[str, Any] = {name: value for name, value in options.items() if value}
    if given and isinstance(model, str | Path):
        model = ModelRef(model, **given)
    elif given:
        raise PiLoraError(f"{', '.join(given)}: of a name; a ModelRef holds its own, and a loaded model has none")
    if isinstance(model, ModelSource):
        return model
    if isinstance(model, LoadedModel):
        return model.source
    if not isinstance(model, str | os.PathLike):
        kind = type(model).__name__
        raise PiLoraError(f"{kind}: is no model here; give a name, or of a module LoadedModel(resolve(name), module)")
    ask_again()
    return resolve_model(ref_of(model))


@python_messages()
def load(model: AnyModel, **options: Unpack[ModelOptions]) -> "LoadedModel":
    """Load a model with its scaling, ready to be measured.

    Args:
        model: As for `resolve`, or a model that is loaded.
        options: As for `resolve`. The `dtype` is by default as stored on a GPU, float32 on a CPU, and bfloat16 after
            QLoRA.

    Returns:
        The model: `module` is that of transformers or PEFT; `tokenizer`, the `window` in tokens, the `scale` L'/L.

    Raises:
        ModelError: The model is missing, incomplete or not the one that a run was tuned from.
        ScalingError: The model cannot be extended.
    """
    from pi_lora.models.loaded import LoadedModel, load_model

    source = resolve(model, **options)
    return model if isinstance(model, LoadedModel) else load_model(source)


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Ask the hub anew in each call of a function, and show progress bars if it is called with `progress=True`. The
    command line shows everything.
    """
    progress = inspect.signature(function).parameters.get("progress")

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        from pi_lora.hub import ask_again

        shown = current_ui.get()
        if shown is SILENT:
            ask_again()
            if progress and options.get("progress", progress.default):
                from pi_lora.terminal import progress_bar

                shown = UI(progress=progress_bar)
        with python_messages(), showing(shown):
            return function(*arguments, **options)

    return call


def path_of(file: FilePath) -> Path:
    """Return a path, with the home folder spelled out."""
    return Path(file).expanduser()


def optional_path(file: FilePath | None) -> Path | None:
    """Return a path, or None without a file."""
    return path_of(file) if file else None


def name_of(model: AnyModel) -> str:
    """Return a model as a user names it, with the home folder spelled out."""
    if not isinstance(model, str | os.PathLike):
        return model.name
    return os.path.expanduser(os.fspath(model))


def ref_of(model: AnyModel) -> ModelRef:
    """Return a model as a reference, with the home folder spelled out and the full name of the dtype."""
    ref = ModelRef.of(model) if isinstance(model, str | os.PathLike) else ModelRef(model.name)
    return replace(ref, name=name_of(ref), base=optional_name(ref.base), dtype=dtype_of(ref.dtype))


def optional_name(name: str | os.PathLike[str] | None) -> str | None:
    """Return a model or text as a user names it, or None without one."""
    return name_of(name) if name else None


def dtype_of(dtype: str | None) -> str | None:
    """Return the full name of a dtype, as of `bf16` or `torch.bfloat16`; raise PiLoraError if there is no such one."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    name = SHORT_DTYPES.get(name, name)
    if name not in SHORT_DTYPES.values():
        raise PiLoraError(f"dtype: {dtype}: is not known; choose from {', '.join(SHORT_DTYPES.values())}")
    return name


def section_of(kind: type[SectionT], values: Mapping[str, Any]) -> SectionT:
    """Return options as their section; raise PiLoraError for the first that is wrong."""
    from pydantic import ValidationError

    from pi_lora.recipe.section import suggestion
    from pi_lora.storage import first_problem

    plain = {key: name_of(value) if isinstance(value, str | os.PathLike) else value for key, value in values.items()}
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        unknown = sorted(values.keys() - kind.model_fields.keys())
        if unknown:
            raise PiLoraError(f"{unknown[0]}: unknown option; {suggestion(unknown[0], kind)}") from None
        raise PiLoraError(*first_problem(error).splitlines()) from None


def tokens_of(target: int | str) -> int:
    """Return a target window in tokens, as of `16k`; raise PiLoraError if it is no number of tokens."""
    from pi_lora.recipe.schema import Context

    return section_of(Context, {"target": target}).target


def given_recipe(recipe: AnyRecipe) -> "Path | Mapping[str, Any]":
    """Return a recipe as a path, or as the values of its sections, as JSON has them."""
    if isinstance(recipe, str | Path):
        return path_of(recipe)
    values = recipe if isinstance(recipe, Mapping) else recipe.model_dump(mode="json")
    plain: dict[str, Any] = json.loads(json.dumps(values, default=os.fspath))
    return plain


def recipe_name(recipe: AnyRecipe) -> str:
    """Return how a command names a recipe."""
    return str(recipe) if isinstance(recipe, str | Path) else "RECIPE"


def as_words(overrides: Sequence[Override]) -> Iterator[str]:
    """Yield overrides as on the command line; JSON is YAML.

    >>> list(as_words(["scaling=pi", {"training.steps": 100}]))
    ['scaling=pi', 'training.steps=100']
    """
    for override in overrides:
        if isinstance(override, str):
            yield override
        else:
            for key, value in override.items():
                yield f"{key}={json.dumps(value, default=os.fspath)}"


def join_launched_processes() -> None:
    """Meet the other processes of this command, if a launcher started several."""
    from pi_lora.distributed import is_launched, join_processes
    from pi_lora.models.device import device

    if is_launched():
        join_processes(cpu=device().type == "cpu")
