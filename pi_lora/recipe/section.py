"""What every part of a recipe is made of: a frozen pydantic model, and the types that several parts share."""

from collections.abc import Iterator
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from pi_lora.errors import RecipeError
from pi_lora.storage import first_problem

Seed = Annotated[int, Field(ge=0, lt=2**32)]


def as_tokens(value: Any) -> Any:
    """Return a length as people write it in tokens; what is no such length as it is.

    >>> as_tokens("16k"), as_tokens("512"), as_tokens(512), as_tokens("far")
    (16384, 512, 512, 'far')
    """
    digits = str(value).lower().removesuffix("k")
    if not isinstance(value, str) or not digits.isdecimal():
        return value
    return int(digits) * (1 if digits == value else 1024)


def _as_tuple(value: Any) -> Any:
    """Return a list as a tuple, and `a,b` of a command line as two values."""
    if not isinstance(value, list):
        return value
    return tuple(part for each in value for part in (each.split(",") if isinstance(each, str) else [each]))


LIST = BeforeValidator(_as_tuple)
Texts = Annotated[tuple[str, ...], LIST]
# A number of tokens, or as `16k`, which is 16,384.
Tokens = Annotated[PositiveInt, BeforeValidator(as_tokens)]
Windows = Annotated[tuple[Annotated[Tokens, Field(gt=1)], ...] | None, LIST]


class Section(BaseModel):
    """A part of a recipe: unknown keys and wrong values are errors, and values cannot be changed. The string below a
    field describes it. Recipes are read strictly, options of a command from text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def conflicts(self) -> Iterator[str]:
        """Yield how values do not fit together."""
        yield from ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if conflicts := "; ".join(self.conflicts()):
            raise ValueError(conflicts)
        return self

    def changed(self, **values: Any) -> Self:
        """Return the section with other values; raise RecipeError for the first that is wrong."""
        try:
            return type(self).model_validate({**self.model_dump(), **values})
        except ValidationError as error:
            raise RecipeError([first_problem(error)]) from None


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """Yield the sections that a field holds, whether alone, optional or in a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)
