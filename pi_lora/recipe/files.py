"""Recipe files: YAML with one `extends:` one level deep, overrides from the command line, and every mistake at once."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pi_lora.errors import RecipeError, first_line
from pi_lora.files.reading import read_text, reason, shortened
from pi_lora.recipe.places import shipped_recipes
from pi_lora.recipe.schema import Recipe, Section, names_something, sections_in

# The resolved recipe of a run folder.
RECIPE_FILE = "recipe.yaml"
EXTENDS = "extends"
COMMAND_LINE = "command line"
DEFAULT = "default"
# What a recipe may have; those of the paper's grid have a tenth.
MOST_BYTES, MOST_NODES, MOST_DEPTH = 1_000_000, 1_000, 20

KeyPath = tuple[str | int, ...]
# A key that version 0.1 still reads; `true` and `false` are two of the values that it has now. Origins tell.
FORMER, PRESENT, AS_FORMER = ("tuning", "embeddings_and_norms"), ("tuning", "also_train"), ", as embeddings_and_norms"
NOW = {True: "embeddings_and_norms", False: "nothing"}
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `2e-5` as a number (YAML 1.2) and refuses a key that is given twice, or is not text; and
    more than `MOST_NODES` keys and values, those that an alias repeats counted again, or deeper than `MOST_DEPTH`.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes = self.depth = 0
        self.sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event, before = self.peek_event(), self.nodes  # type: ignore[no-untyped-call]
        self.depth += 1
        self._count(1, event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.AliasEvent):
            # What has no size yet is not complete: an alias within it would never end.
            self._count(self.sizes.get(id(node), MOST_NODES), event.start_mark)
        else:
            self.sizes[id(node)] = self.nodes - before
        return node

    def _count(self, nodes: int, mark: Any) -> None:
        self.nodes += nodes
        if self.nodes > MOST_NODES or self.depth > MOST_DEPTH:
            limits = f"more than {MOST_NODES:,} keys and values, or nested deeper than {MOST_DEPTH}"
            raise yaml.MarkedYAMLError(problem=limits, problem_mark=mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag not in (_TAG + "str", _TAG + "merge") or not names_something(key.value):
                raise yaml.MarkedYAMLError(problem="a key is not text; quote it", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value}: given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# A date is text: nothing in a recipe is one, and 2001-99-99 would be an error of Python's.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, shape) for tag, shape in known if tag != _TAG + "timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_exponent = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver(_TAG + "float", _exponent, list("-+0123456789."))
_made = (None, *(_TAG + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map")))
_Loader.yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in _made}


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe, and for every dotted key the origin of its value: `file:line`, the command line, or the default."""

    recipe: Recipe
    origins: Mapping[str, str]

    @property
    def renamed(self) -> str | None:
        """A line to a user who gave a key by its former name."""
        origin, now = self.origins[".".join(PRESENT)], self.recipe.tuning.also_train
        return f"{origin}: is {'.'.join(PRESENT)} now; write also_train: {now}" if AS_FORMER in origin else None


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> ResolvedRecipe:
    """Read `path` over what it extends, apply `key=value` overrides, and check; RecipeError has all mistakes."""
    if path.name.startswith("_"):
        raise RecipeError([f"{path}: is a parent for other recipes (its name begins with _); run one that extends it"])
    tree, origins = _read(path)
    if (parent := tree.pop(EXTENDS, None)) is not None:
        where = origins.get((EXTENDS,), str(path))
        if not isinstance(parent, str) or not Path(parent).name.startswith("_"):
            raise RecipeError([f"{where}: extends: {parent}: a parent's file name begins with _; name such a file"])
        base, base_origins = _read(path.parent / parent)
        if own := base_origins.get((EXTENDS,)):
            raise RecipeError([f"{own}: extends: a parent cannot extend another; write its keys here"])
        tree, origins = _merge(base, tree), {**base_origins, **origins}
    for override in overrides:
        _apply_override(tree, origins, override)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError([_problem(path, each, origins) for each in error.errors()]) from None
    places: list[tuple[str, ...]] = []
    for section, content in recipe:
        keys = type(content).model_fields if isinstance(content, Section) else ()
        places += [(section, key) for key in keys] or [(section,)]
    return ResolvedRecipe(recipe, {".".join(place): origins.get(place, DEFAULT) for place in places})


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe as YAML with every value spelled out; `load_recipe` of it returns an equal recipe."""
    text: str = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def recipe_summary(path: Path) -> str:
    """Return the first line of a recipe file if it is a comment: what it makes and what it needs."""
    try:
        first = read_text(path, MOST_BYTES).partition("\n")[0]
    except (OSError, ValueError) as error:
        raise RecipeError([f"{path}: cannot be read as a text file ({reason(error)}); move it away"]) from None
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def recipe_paths(folder: Path) -> list[Path]:
    """Return every runnable recipe below `folder`, sorted; the folder is the registry."""
    return sorted(path for path in folder.rglob("*.yaml") if not path.name.startswith("_"))


def _read(path: Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Return the tree of a file, and the `file:line` of each of its keys."""
    try:
        text = read_text(path, MOST_BYTES)
    except FileNotFoundError:
        folder = shipped_recipes()
        shipped = {file.stem: file.relative_to(folder).with_suffix("") for file in reversed(recipe_paths(folder))}
        known = shipped | {file.stem: file for file in path.parent.glob("*.yaml")}
        near = difflib.get_close_matches(path.name.removesuffix(".yaml"), known, n=1)
        hint = f"did you mean {known[near[0]]}?" if near else "pi-lora recipes lists what is there"
        raise RecipeError([f"{path}: no such recipe; {hint}"]) from None
    except (OSError, ValueError) as error:
        raise RecipeError([f"{path}: cannot be read as a text file ({reason(error)}); give a YAML file"]) from None
    try:
        node, tree = _parsed(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError([f"{path}:{line}: {error.problem}; correct the YAML"]) from None
    except yaml.YAMLError as error:
        raise RecipeError([f"{path}: not YAML ({first_line(error)}); give a YAML file"]) from None
    if not isinstance(tree, dict):
        what = "is empty" if tree is None else f"holds a {type(tree).__name__}, not keys"
        raise RecipeError([f"{path}: {what}; write `key: value` lines, at least of model, context and data"])
    origins = dict(_lines(node, path))
    tuning = tree.get("tuning")
    if isinstance(tuning, dict) and PRESENT[1] not in tuning and isinstance(tuning.get(FORMER[1]), bool):
        tuning[PRESENT[1]] = NOW[tuning.pop(FORMER[1])]
        origins[PRESENT] = origins.get(FORMER, str(path)) + AS_FORMER
    return tree, origins


def _parsed(text: str) -> tuple[yaml.Node | None, Any]:
    """Return the node of a YAML document and its value; raise YAMLError if it is none."""
    loader = _Loader(text)
    node = loader.get_single_node()
    try:
        return node, loader.construct_document(node) if node else None
    except (ValueError, LookupError) as error:  # of a number that is none, as `!!int x` or `0b_`
        raise yaml.MarkedYAMLError(problem=f"a value is not what it says ({error})") from None


def _lines(node: yaml.Node | None, path: Path, at: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
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


def _apply_override(tree: dict[str, Any], origins: dict[KeyPath, str], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key or not names_something(key):
        raise RecipeError([f"{override}: not an override; write key=value, as in training.steps=100"])
    try:
        _, value = _parsed(text)
    except yaml.YAMLError:
        raise RecipeError([f"{override}: the value is not YAML; quote it"]) from None
    origin = COMMAND_LINE
    if key == ".".join(FORMER) and isinstance(value, bool):
        key, value, origin = ".".join(PRESENT), NOW[value], origin + AS_FORMER
    *sections, last = key.split(".")
    for section in sections:
        inner = tree.get(section) or {}
        if not isinstance(inner, dict):
            raise RecipeError([f"{override}: {section} is not a section; write {section}=value"])
        tree[section] = tree = dict(inner)
    tree[last] = value
    origins[(*sections, last)] = origin


def _problem(path: Path, error: Any, origins: Mapping[KeyPath, str]) -> str:
    location: KeyPath = tuple(error["loc"])
    known = next((origins[location[:n]] for n in range(len(location), 0, -1) if location[:n] in origins), str(path))
    key = ".".join(map(str, location))
    if error["type"] == "extra_forbidden":
        fields = _fields_at(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), fields, n=1)
        what = f"unknown key; did you mean {near[0]}?" if near else f"unknown key; choose from {', '.join(fields)}"
    elif error["type"] == "missing":
        what = "missing; every recipe needs it"
    else:
        message, given = error["msg"].removeprefix("Value error, "), error["input"]
        shown = "" if isinstance(given, dict) or error["type"] == "value_error" else f", not {shortened(given)}"
        what = (message[0].lower() + message[1:] if key else message) + shown
    return f"{known}: {key}: {what}" if key else f"{known}: {what}"


def _fields_at(location: KeyPath) -> list[str]:
    section: type[Section] = Recipe
    for name in location:
        if isinstance(name, str):
            section = next(sections_in(section.model_fields[name].annotation))
    return list(section.model_fields)
