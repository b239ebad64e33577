"""Divisors of the rotary frequencies in a recipe, or in a file that `pi-lora search` wrote."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from pi_lora.errors import PiLoraError
from pi_lora.recipe.section import LIST, Section
from pi_lora.storage import read_json


class Factors(Section):
    """Divisors of the frequencies for `scaling: factors`: this section, a list, or a file of `pi-lora search`."""

    factors: Annotated[tuple[PositiveFloat, ...], LIST, Field(min_length=1)]
    """Divisor of every rotary frequency, the highest frequency first."""
    attention_factor: PositiveFloat = 1.0
    """Factor of cosines and sines, as in YaRN."""
    searched: Annotated[tuple[PositiveInt, PositiveInt], LIST] | None = None
    """Windows L and L' of a search, in tokens; a recipe with other windows is refused."""


class _SearchFile(Factors, extra="ignore"):
    """A file of `pi-lora search`, which holds more."""

    original: int | None = None
    target: int | None = None


def read_factors(file: Path) -> Factors:
    """Read a file that `pi-lora search` wrote; raise ModelError if it holds no factors."""
    content = read_json(file, _SearchFile, remedy="name a file that pi-lora search wrote")
    factors = Factors(factors=content.factors, attention_factor=content.attention_factor)
    if content.original and content.target:
        return factors.changed(searched=(content.original, content.target))
    return factors


def _as_factors(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return read_factors(Path(value).expanduser()).model_dump()
        except PiLoraError as error:
            raise ValueError(str(error)) from None
    if isinstance(value, list):
        return {"factors": value}
    return value


FactorsOrFile = Annotated[Factors, BeforeValidator(_as_factors)]
