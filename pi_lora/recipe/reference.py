"""The reference page of all recipe keys, generated from the schema."""

import json
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from pi_lora.recipe.schema import Recipe
from pi_lora.recipe.section import Section, sections_in

HEAD = """# Every key of a recipe

Written by `pi-lora recipes --keys` from the schema. A key without a default is required where its section is given.
On the command line: `pi-lora train RECIPE training.steps=200`. `pi-lora show RECIPE` prints a resolved recipe, and the
origin of each value.
"""
NAMES = {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}
TABLE_HEAD = "| key | values | default | |\n|---|---|---|---|\n"


def reference_page() -> str:
    """Return a table for each section of a recipe: key, values, default, description."""
    parts = [HEAD, "\n## The recipe itself\n\n", *_table("", Recipe)]
    for name, field in Recipe.model_fields.items():
        for section in sections_in(field.annotation):
            parts += [f"\n## `{name}`\n\n{_summary(section)}\n\n", *_table(f"{name}.", section)]
    return "".join(parts)


def _table(prefix: str, section: type[Section]) -> Iterator[str]:
    """Yield the lines of a table; keys of several sections inside that agree in all of it share a row."""
    keys: dict[tuple[str, str], list[str]] = {}
    for key, cells in _rows(prefix, section):
        keys.setdefault((key.rpartition(".")[2], cells), []).append(f"`{key}`")
    yield TABLE_HEAD
    for (_, cells), those in keys.items():
        yield f"| {', '.join(those)} | {cells} |\n"


def _rows(prefix: str, section: type[Section]) -> Iterator[tuple[str, str]]:
    """Yield key and cells of a section and of the sections inside it; sections of the recipe itself have tables."""
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        subsection = next(sections_in(field.annotation), None)
        if subsection is None:
            yield key, f"{_values(field.annotation)} | {_default(field)} | {field.description or ''}"
        elif prefix:
            yield key, f"section | {_default(field)} | {_summary(subsection)}"
            yield from _rows(f"{key}.", subsection)


def _values(annotation: Any) -> str:
    """Describe the values that a type accepts."""
    origin = get_origin(annotation)
    arguments = [argument for argument in get_args(annotation) if argument not in (NoneType, ...)]
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is dict:
        return "keys with numbers"
    if origin is tuple:
        return "list of " + _values(arguments[0])
    if origin is Annotated:
        return _values(arguments[0])
    if arguments:
        return " or ".join(map(_values, arguments))
    return NAMES[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    if field.default in (None, (), {}):
        return "none"
    return f"`{json.dumps(field.default)}`".replace('"', "")


def _summary(section: type[Section]) -> str:
    return (section.__doc__ or "").splitlines()[0]
