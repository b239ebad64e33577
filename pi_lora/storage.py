"""Small files read with one clear line for damage; files, also of the cache, written whole or not at all."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from filelock import FileLock
from pydantic import TypeAdapter, ValidationError

from pi_lora.errors import ModelError

T = TypeVar("T")


def read_json(file: Path, kind: type[T], remedy: str) -> T:
    """Return a JSON file as `kind`; raise ModelError with file, field and `remedy`."""
    try:
        return TypeAdapter(kind).validate_json(file.read_bytes())
    except ValidationError as error:
        raise ModelError(f"{file}: {first_problem(error)}; {remedy}") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); {remedy}") from None


def first_problem(error: ValidationError) -> str:
    """Return the first thing that is wrong: the field, what it should be, and a short value that is not."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"is not JSON ({first['ctx']['error']})"
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {problem_text(first)}" if place else problem_text(first)


def problem_text(problem: Mapping[str, Any]) -> str:
    """Return what one of pydantic's errors says of a value, with the value if it is a short one."""
    message: str = problem["msg"].removeprefix("Value error, ")
    value = problem["input"]
    shown = isinstance(value, str | int | float | None) and problem["type"] not in ("missing", "value_error")
    # As in YAML, which also has dates, or on the command line.
    written = value if value and isinstance(value, str) else json.dumps(value, default=str)
    return message[0].lower() + message[1:] + (f", not {written:.60}" if shown else "")


def write_json(file: Path, content: Any) -> None:
    """Write a file of JSON whole or not at all, in a new folder if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(content, indent=2) + "\n")


def check_can_write(*files: Path | None) -> None:
    """Raise OSError if one of `files` cannot be written, before hours are spent on what it is to hold."""
    for file in filter(None, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            file.open("ab").close()
        TemporaryFile(dir=file.parent).close()


def write_whole(file: Path, text: str) -> None:
    """Write a file whole or not at all, also if the machine loses power."""
    part = file.with_name(f".{file.name}.part")
    part.unlink(missing_ok=True)  # a link that stands there is not followed
    with part.open("x", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    part.replace(file)


def cache_folder() -> Path:
    """Return `$PI_LORA_CACHE`, or `~/.cache/pi-lora`; it may be deleted whenever nothing runs."""
    return Path(os.environ.get("PI_LORA_CACHE") or "~/.cache/pi-lora").expanduser()


def make_once(file: Path, read: Callable[[Path], T | None], write: Callable[[Path], None]) -> T:
    """Return what `read` finds in a file of the cache, which `write` makes if it is None, in one process at a time. A
    complete cache may be read-only.
    """
    if (found := read(file)) is not None:
        return found
    part = file.with_suffix(".partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        if (found := read(file)) is not None:
            return found
        try:
            write(part)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
    found = read(file)
    assert found is not None, f"{file}: cannot be read back"
    return found
