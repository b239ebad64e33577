"""Recipe files: YAML with one `extends:` one level deep, overrides from the command line, and every mistake at once."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from pi_lora.errors import RecipeError
from pi_lora.recipe.schema import Recipe
from pi_lora.recipe.section import Section, sections_in
from pi_lora.storage import problem_text

# The resolved recipe of a run folder.
RECIPE_FILE = "recipe.yaml"
EXTENDS = "extends"
COMMAND_LINE = "command line"
DEFAULT = "default"
KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `2e-5` as a number (YAML 1.2)."""


_exponent = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _exponent, list("-+0123456789."))


class ResolvedRecipe(NamedTuple):
    """A recipe, and for every dotted key the origin of its value: `file:line`, the command line, or the default."""

    recipe: Recipe
    origins: Mapping[str, str]


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> ResolvedRecipe:
    """Read `path`, or the shipped recipe of that name, over what it extends, apply `key=value` overrides, and check;
    RecipeError has all mistakes.
    """
    path = find_recipe(path)
    tree, origins = _read(path)
    if parent := tree.pop(EXTENDS, None):
        origins.pop((EXTENDS,))
        base, base_origins = _read(path.parent / str(parent))
        tree, origins = _merge(base, tree), {**base_origins, **origins}
    for override in overrides:
        key, value = _parsed_override(override)
        origins = {key[:1]: COMMAND_LINE, **origins, key: COMMAND_LINE}  # an unknown section is blamed by its name
        for name in reversed(key):
            value = {name: value}
        tree = _merge(tree, value)
    try:
        recipe = Recipe.model_validate(tree, strict=True)
    except ValidationError as error:
        raise RecipeError([_problem(path, each, origins) for each in error.errors()]) from None
    sections = recipe.model_dump().items()
    places = [(name, *key) for name, keys in sections for key in (zip(keys) if isinstance(keys, dict) else [()])]
    return ResolvedRecipe(recipe, {".".join(place): origins.get(place, DEFAULT) for place in places})


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe as YAML with every value spelled out; `load_recipe` of it returns an equal recipe."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def shipped_recipes() -> Path:
    """Return the folder of the recipes that come with the package: in it when installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def find_recipe(name: Path) -> Path:
    """Return the recipe file that a user means: `name`, or `name` with `.yaml`, in the current folder; else the shipped
    recipe that is called so; else `name` itself, which does not exist.

    >>> find_recipe(Path("paper/7b_8k")).relative_to(shipped_recipes()).as_posix()
    'paper/7b_8k.yaml'
    """
    candidates = (folder / file for folder in (Path(), shipped_recipes()) for file in (name, Path(f"{name}.yaml")))
    return next((file for file in candidates if file.is_file()), name)


def recipe_paths(folder: Path) -> list[Path]:
    """Return every runnable recipe below `folder`, sorted; the folder is the registry."""
    return sorted(folder.rglob("[!_]*.yaml"))


def recipe_summary(path: Path) -> str:
    """Return the first line of a recipe file, a comment: what it makes and what it needs."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def _read(path: Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Return the tree of a file, and the `file:line` of each of its keys."""
    try:
        content = path.read_bytes()
        node, tree = yaml.compose(content, _Loader), yaml.load(content, _Loader)
    except (FileNotFoundError, IsADirectoryError):
        raise RecipeError([f"{path}: no such recipe; pi-lora recipes lists what is there"]) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError([f"{path}:{line}: {error.problem}; correct the YAML"]) from None
    except yaml.YAMLError:
        raise RecipeError([f"{path}: is not a text file; give a YAML file"]) from None
    if not isinstance(tree, dict):
        raise RecipeError([f"{path}: holds no keys; write `key: value` lines, at least of model, context and data"])
    origins: dict[KeyPath, str] = {}
    for key, where in _lines(node, path):
        if key in origins:
            raise RecipeError([f"{where}: {'.'.join(map(str, key))}: given twice; keep one"])
        origins[key] = where
    return tree, origins


def _lines(node: yaml.Node | None, path: Path, at: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield each key and list entry below a node, with the line where it stands."""
    entries = node.value if isinstance(node, yaml.CollectionNode) else []
    for index, entry in enumerate(entries):
        key, value = entry if isinstance(entry, tuple) else (entry, entry)
        inner = (*at, key.value if isinstance(entry, tuple) else index)
        yield inner, f"{path}:{key.start_mark.line + 1}"
        yield from _lines(value, path, inner)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Put `over` on `base`: sections key by key, everything else (lists too) as a whole."""
    merged = {**base, **over}
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merge(base[key], value)
    return merged


def _parsed_override(override: str) -> tuple[tuple[str, ...], Any]:
    """Return the names and the value of `section.key=value`."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError([f"{override}: not an override; write key=value, as in training.steps=100"])
    try:
        return tuple(key.split(".")), yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise RecipeError([f"{override}: the value is not YAML; quote it"]) from None


def _problem(path: Path, error: Any, origins: Mapping[KeyPath, str]) -> str:
    location: KeyPath = tuple(error["loc"])
    known = next((origins[location[:n]] for n in range(len(location), 0, -1) if location[:n] in origins), str(path))
    key = ".".join(map(str, location))
    if error["type"] == "extra_forbidden":
        fields = _fields_at(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), fields, n=1)
        what = f"unknown key; did you mean {near[0]}?" if near else f"unknown key; choose from {', '.join(fields)}"
    elif error["type"] == "missing":
        what = "missing; add it"
    else:
        what = problem_text(error)
    return f"{known}: {key}: {what}" if key else f"{known}: {what}"


def _fields_at(location: KeyPath) -> list[str]:
    section: type[Section] = Recipe
    for name in location:
        if isinstance(name, str):
            section = next(sections_in(section.model_fields[name].annotation))
    return list(section.model_fields)
