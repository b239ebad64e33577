"""What every part of a recipe is made of: a strict, frozen pydantic model, and the types that several parts share."""

from collections.abc import Iterator
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Seed = Annotated[int, Field(ge=0, lt=2**32)]
# YAML has lists only; a recipe is frozen and holds tuples.
LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Texts = Annotated[tuple[str, ...], LIST]
Windows = Annotated[tuple[int, ...] | None, LIST]


class Section(BaseModel):
    """A part of a recipe: unknown keys and wrong types are errors, and values cannot be changed. The string below a
    field describes it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def changed(self, **values: Any) -> Self:
        """Return the section with other values, which are checked."""
        return type(self).model_validate({**self.model_dump(), **values})


def sections_in(annotation: Any) -> Iterator[type[Section]]:
    """Yield the sections that a field holds, whether alone, optional or in a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from sections_in(inner)
