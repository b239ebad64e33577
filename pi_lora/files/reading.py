"""The one way to read a small file: a regular one of bounded size, and its JSON checked against a schema."""

import os
import re
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from pi_lora.errors import ModelError

# The longest JSON file: an index of the weights of the largest models takes a tenth of it.
MOST_BYTES = 32_000_000
# Of a value that is shown in a message.
SHOWN = 60
# Windows, which lacks it, has no pipes among its files.
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)

_KIND = re.compile(r"_.*|str|int|float|(dict|list)\[.*")

T = TypeVar("T")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def read_text(file: Path, limit: int = MOST_BYTES) -> str:
    """Return the text of a regular file of at most `limit` bytes; raise OSError or ValueError (see `reason`)."""
    return _read(file, limit).decode("utf-8")


def _read(file: Path, limit: int) -> bytes:
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | _AT_ONCE)) as content:
        if not stat.S_ISREG(os.fstat(content.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        text = content.read(limit + 1)
    if len(text) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return text


def reason(error: OSError | ValueError) -> str:
    """Return in a few words why a file could not be read."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split()) or type(error).__name__


def read_json(file: Path, kind: type[T], remedy: str, limit: int = MOST_BYTES) -> T:
    """Return a JSON file of at most `limit` bytes as `kind`; raise ModelError with file, field and `remedy`."""
    try:
        content: T = _adapter(kind).validate_json(_read(file, limit))
        return content
    except ValidationError as error:
        what = problem_of(error)
    except (OSError, ValueError) as error:
        what = f"cannot be read ({reason(error)})"
    raise ModelError(f"{file}: {what}; {remedy}")


def problem_of(error: ValidationError) -> str:
    """Return the first thing that is wrong: the field, what it should be, and what it is."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"is not JSON ({first['ctx']['error']})"
    message = first["msg"].removeprefix("Value error, ")
    what = message[0].lower() + message[1:]
    if isinstance(first["input"], str | int | float | None) and first["type"] not in ("missing", "value_error"):
        what += f", not {shortened(first['input'])}"
    # Without the names of the kinds that a field may be.
    place = ".".join(part for part in map(str, first["loc"]) if not _KIND.fullmatch(part))
    return ": ".join([place, what] if place else [what])


def shortened(value: Any) -> str:
    """Return how a value is written, cut to what fits in a line."""
    try:
        shown = repr(value)
    except ValueError:  # Python does not write whole numbers of more than 4,300 digits
        return "a number of thousands of digits"
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
