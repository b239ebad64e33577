"""Recipe files: YAML with an `extends:` one level deep, and overrides from the command line. All mistakes are reported
together.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from pi_lora.errors import RecipeError
from pi_lora.recipe.schema import Recipe
from pi_lora.recipe.section import Section, sections_in, suggestion
from pi_lora.storage import problem_text

# The resolved recipe of a run folder.
RECIPE_FILE = "recipe.yaml"
EXTENDS = "extends"
COMMAND_LINE = "command line"
DEFAULT = "default"
KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the numbers of YAML 1.2: `2e-5` is one, `0100` is a hundred, `16:00` and dates are text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_whole = re.compile(r"^[-+]?\d+(_\d+)*$")
_exponent = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _whole, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _exponent, list("-+0123456789."))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what `_Loader` would read as a number, such as a commit `12e4567`."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _text(_loader: _Loader, node: yaml.ScalarNode) -> str:
    """Return a string, with the two halves of an emoji joined that JSON escapes one by one."""
    value: str = node.value
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_Loader.add_constructor("tag:yaml.org,2002:str", _text)


class ResolvedRecipe(NamedTuple):
    """A recipe, and the origin of the value of every dotted key: `file:line`, the command line, or the default."""

    recipe: Recipe
    origins: Mapping[str, str]


def load_recipe(given: Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> ResolvedRecipe:
    """Read a recipe file, the shipped recipe of that name, or the values of all sections, and apply `key=value`
    overrides. Raise RecipeError with all mistakes.
    """
    tree: dict[str, Any]
    origins: dict[KeyPath, str]
    if isinstance(given, Path):
        tree, origins = _read_with_parent(find_recipe(given))
    else:
        tree, origins = dict(given), {(): "recipe"}
    malformed: list[str] = []
    for override in overrides:
        try:
            names, value = _parsed_override(override)
            tree, key = _with_value(tree, names, value)
        except RecipeError as error:
            malformed += error.problems
            continue
        section = key[:1]
        origins.setdefault(section, COMMAND_LINE)  # an unknown section is reported by its name
        origins = _merge_origins(origins, {key: COMMAND_LINE})
    try:
        recipe = Recipe.model_validate(tree, strict=True)
    except ValidationError as error:
        problems: dict[KeyPath, list[Any]] = {}
        for problem in error.errors():
            key, _ = _key_of(problem)
            problems.setdefault(key, []).append(problem)
        found = [_problems(key, alternatives, origins) for key, alternatives in problems.items()]
        raise RecipeError([*malformed, *itertools.chain.from_iterable(found)]) from None
    if malformed:
        raise RecipeError(malformed)
    return ResolvedRecipe(recipe, _origins_by_key(recipe, origins))


def _read_with_parent(path: Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Return the tree and the origins of a recipe file, merged with those of the file that it extends."""
    tree, origins = _read_tree(path)
    if parent := tree.pop(EXTENDS, None):
        origins.pop((EXTENDS,))
        base, base_origins = _read_tree(path.parent / str(parent))
        tree = _merge(base, tree)
        origins = _merge_origins(base_origins, origins)
    return tree, origins


def _origins_by_key(recipe: Recipe, origins: Mapping[KeyPath, str]) -> dict[str, str]:
    """Return the origin of every value of a recipe, by the dotted key."""
    keys: list[KeyPath] = []
    for name, value in recipe.model_dump().items():
        if isinstance(value, dict):
            keys += [(name, key) for key in value]
        else:
            keys.append((name,))
    overridden = [key for key, origin in origins.items() if origin == COMMAND_LINE]
    found = {}
    for key in keys:
        origins_of_key = [origins[key]] if key in origins else []
        if any(other[: len(key)] == key for other in overridden):
            origins_of_key.append(COMMAND_LINE)
        found[_dotted(key)] = ", ".join(dict.fromkeys(origins_of_key)) or DEFAULT
    return found


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe as YAML with every value. `load_recipe` of this YAML returns an equal recipe."""
    text: str = yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def shipped_recipes() -> Path:
    """Return the folder of the shipped recipes: inside an installed package, next to the package in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    if installed.is_dir():
        return installed
    return package.parent / "recipes"


def find_recipe(name: Path) -> Path:
    """Return the recipe file of that name, with or without `.yaml`: first below the current folder, then a shipped
    recipe. If there is none, return `name` itself.

    >>> find_recipe(Path("paper/7b_8k")).relative_to(shipped_recipes()).as_posix()
    'paper/7b_8k.yaml'
    """
    for folder in (Path(), shipped_recipes()):
        for file_name in (name, Path(f"{name}.yaml")):
            file = folder / file_name
            if file.is_file():
                return file
    return name


def recipe_paths(folder: Path) -> list[Path]:
    """Return every runnable recipe below `folder`, sorted; the folder is the registry."""
    return sorted(folder.rglob("[!_]*.yaml"))


def recipe_summary(path: Path) -> str:
    """Return the comment on the first line of a recipe file, which says what the recipe makes and needs."""
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    return first_line.lstrip("# ")


def _read_tree(path: Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Return the tree of a YAML file, and the `file:line` of every key. The empty key stands for the file."""
    try:
        content = path.read_bytes()
        loader = _Loader(content)
        node = loader.get_single_node()
        tree = loader.construct_document(node) if node else None
    except IsADirectoryError:
        raise RecipeError([f"{path}: is a folder; name a recipe, such as the recipe.yaml of a run"]) from None
    except FileNotFoundError:
        raise RecipeError([f"{path}: no such recipe; pi-lora recipes lists what is there"]) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError([f"{path}:{line}: {error.problem}; correct the YAML"]) from None
    except yaml.YAMLError:
        raise RecipeError([f"{path}: is not a text file; give a YAML file"]) from None
    if not isinstance(tree, dict):
        raise RecipeError([f"{path}: holds no keys; write `key: value` lines, at least of model, context and data"])
    origins: dict[KeyPath, str] = {(): str(path)}
    for key, origin in _key_lines(node, path):
        if key in origins:
            raise RecipeError([f"{origin}: {_dotted(key)}: given twice; keep one"])
        origins[key] = origin
    return tree, origins


def _dotted(key: KeyPath) -> str:
    return ".".join(map(str, key))


def _key_lines(node: yaml.Node | None, path: Path, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of every key and list entry below a node, with `file:line`."""
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, entry, entry) for index, entry in enumerate(node.value)]
    else:
        return
    for name, marked, value in children:
        key_path = (*prefix, name)
        yield key_path, f"{path}:{marked.start_mark.line + 1}"
        yield from _key_lines(value, path, key_path)


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `over` into `base`: sections key by key, every other value (also a list) as a whole."""
    merged = {**base, **over}
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = _merge(base[key], value)
    return merged


def _with_value(tree: Any, names: KeyPath, value: Any, before: KeyPath = (), typed: str = "") -> tuple[Any, KeyPath]:
    """Return a tree with a value at a dotted key, and the path of the key, which follows `before`. A section is merged
    with the one that is there. A key of a list with one section is in that section. Raise RecipeError if a list has
    several, or if there is a value in place of a section; the message has the key as `typed`.
    """
    if not names:
        both_sections = isinstance(tree, dict) and isinstance(value, dict)
        return _merge(tree, value) if both_sections else value, before
    typed = typed or _dotted(names)
    problem = f"{typed}: {_dotted(before)} is"
    name, *others = names
    inner = tuple(others)
    if isinstance(tree, list):
        if len(tree) > 1:
            raise RecipeError([f"{problem} a list of {len(tree)}; give all of it"])
        entry = tree[0] if tree else None
        changed, path = _with_value(entry, inner if name == "0" else names, value, (*before, 0), typed)
        return [changed], path
    if not isinstance(tree, dict | None):
        raise RecipeError([f"{problem} {tree}, and no section; give all of it"])
    section = tree or {}
    changed, path = _with_value(section.get(name), inner, value, (*before, name), typed)
    return {**section, name: changed}, path


def _merge_origins(base: Mapping[KeyPath, str], over: Mapping[KeyPath, str]) -> dict[KeyPath, str]:
    """Merge the origins of keys as `_merge` does the values: the entries of a list that is replaced are left out."""
    merged = {}
    for key, origin in base.items():
        lists = [key[:length] for length, name in enumerate(key) if isinstance(name, int)]
        if over.keys().isdisjoint(lists):
            merged[key] = origin
    return {**merged, **over}


def _parsed_override(override: str) -> tuple[tuple[str, ...], Any]:
    """Return the names and the value of `section.key=value`: YAML, or a text such as `*.txt` or `books #2`."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError([f"{override}: not an override; write key=value, as in training.steps=100"])
    is_plain = not text.lstrip().startswith(("[", "{", "'", '"'))
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        if not is_plain:
            raise RecipeError([f"{override}: the value is not YAML; quote it"]) from None
        value = text
    if is_plain and isinstance(value, str):
        value = text.strip()
    return tuple(key.split(".")), value


def _key_of(problem: Any) -> tuple[KeyPath, type[Section]]:
    """Return the key that one of pydantic's errors is about, and the section of an unknown key. pydantic adds the type
    to the key, if a value may have several.
    """
    location: KeyPath = tuple(problem["loc"])
    section: type[Section] = Recipe
    for length, name in enumerate(location):
        if isinstance(name, str):
            if name not in section.model_fields:
                is_unknown_key = problem["type"] == "extra_forbidden"
                return location if is_unknown_key else location[:length], section
            section = next(sections_in(section.model_fields[name].annotation), Section)
    return location, section


def _keys_named(name: str) -> Iterator[str]:
    """Yield the keys of all sections of a recipe that have a name.

    >>> list(_keys_named("seed"))
    ['data.seed', 'training.seed']
    """
    for section_name, field in Recipe.model_fields.items():
        for section in sections_in(field.annotation):
            if name in section.model_fields:
                yield f"{section_name}.{name}"


def _problems(location: KeyPath, alternatives: Sequence[Any], origins: Mapping[KeyPath, str]) -> list[str]:
    """Return pydantic's errors about a key, or the conflicts of a section, as lines with the origin of the value, or of
    the innermost section around it that has one.
    """
    kind = alternatives[0]["type"]
    key = _dotted(location)
    if kind == "extra_forbidden":
        _, section = _key_of(alternatives[0])
        unknown = str(location[-1])
        homes = " or ".join(_keys_named(unknown))
        problem = f"unknown key; did you mean {homes}?" if homes else f"unknown key; {suggestion(unknown, section)}"
    elif kind == "missing":
        problem = "missing; add it"
    else:
        problem = problem_text(*alternatives)
    while location not in origins:
        location = location[:-1]
    return [": ".join(filter(None, [origins[location], key, line])) for line in problem.splitlines()]
