"""The reference page of a recipe's keys, from its schema."""

import json
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from pi_lora.recipe.schema import Recipe
from pi_lora.recipe.section import Section, sections_in

HEAD = """# Every key of a recipe

Written by `pi-lora recipes --keys` from the schema. A key without a default is required. On the command line:
`pi-lora train RECIPE training.steps=200`. `pi-lora show RECIPE` prints a resolved recipe, and the origin of each value.
"""
NAMES = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}
TABLE_HEAD = "| key | values | default | |\n|---|---|---|---|\n"


def reference_page() -> str:
    """Return a table for each section of a recipe: key, values, default, description."""
    parts = [HEAD, "\n## The recipe itself\n\n", TABLE_HEAD, *_rows("", Recipe)]
    for name, field in Recipe.model_fields.items():
        for section in sections_in(field.annotation):
            parts += [f"\n## `{name}`\n\n{_summary(section)}\n\n", TABLE_HEAD, *_rows(f"{name}.", section)]
    return "".join(parts)


def _rows(prefix: str, section: type[Section]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        key, inner = f"{prefix}{name}", next(sections_in(field.annotation), None)
        if inner is None:
            yield f"| `{key}` | {_values(field.annotation)} | {_default(field)} | {field.description or ''} |\n"
        elif prefix:
            yield f"| `{key}` | section | {_default(field)} | {_summary(inner)} |\n"
            yield from _rows(f"{key}.", inner)


def _values(annotation: Any) -> str:
    kind, arguments = get_origin(annotation), [each for each in get_args(annotation) if each not in (NoneType, ...)]
    if kind is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if kind is dict:
        return "keys with numbers"
    if kind is tuple:
        return "list of " + _values(arguments[0])
    if kind is Annotated:
        return _values(arguments[0])
    return " or ".join(map(_values, arguments)) if arguments else NAMES[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    if field.default in (None, (), {}):
        return "none"
    return f"`{json.dumps(field.default)}`".replace('"', "")


def _summary(section: type[Section]) -> str:
    return (section.__doc__ or "").splitlines()[0]
