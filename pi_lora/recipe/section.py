"""The base class of the sections of a recipe, a frozen pydantic model, and the types that several sections share."""

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from pi_lora.errors import RecipeError
from pi_lora.storage import first_problem

Seed = Annotated[int, Field(ge=0, lt=2**32)]


def as_tokens(value: Any) -> Any:
    """Return a length such as `16k` or `512` in tokens. Return any other value unchanged.

    >>> as_tokens("16k"), as_tokens("512"), as_tokens(512), as_tokens("far")
    (16384, 512, 512, 'far')
    """
    if not isinstance(value, str):
        return value
    digits = value.lower().removesuffix("k")
    if not digits.isdecimal():
        return value
    unit = 1 if digits == value else 1024
    return int(digits) * unit


def _as_tuple(value: Any) -> Any:
    """Return a list as a tuple, and `a,b` of a command line as two values."""
    if not isinstance(value, list):
        return value
    parts: list[Any] = []
    for entry in value:
        parts += entry.split(",") if isinstance(entry, str) else [entry]
    return tuple(parts)


LIST = BeforeValidator(_as_tuple)
Texts = Annotated[tuple[str, ...], LIST]
# A number of tokens, also as `16k`, which is 16,384.
Tokens = Annotated[PositiveInt, BeforeValidator(as_tokens)]
Windows = Annotated[tuple[Annotated[Tokens, Field(gt=1)], ...] | None, LIST]


def suggestion(unknown: str, section: "type[Section]") -> str:
    """Return the key of a section that an unknown one resembles, or all keys."""
    fields = list(section.model_fields)
    near = difflib.get_close_matches(unknown, fields, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"choose from {', '.join(fields)}"


class Section(BaseModel):
    """A section of a recipe. Unknown keys and wrong values are errors, and the values are frozen.

    The string below a field is the description of the field. Recipes are validated strictly; options of a command are
    parsed from text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def conflicts(self) -> Iterator[str]:
        """Yield a message for every conflict between values."""
        yield from ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if conflicts := "\n".join(self.conflicts()):
            raise ValueError(conflicts)
        return self

    def changed(self, **values: Any) -> Self:
        """Return a copy of the section with these values. Raise RecipeError for the first wrong value."""
        try:
            return type(self).model_validate({**self.model_dump(), **values})
        except ValidationError as error:
            raise RecipeError(first_problem(error).splitlines()) from None


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """Yield the section classes in the annotation of a field: alone, optional or in a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)
