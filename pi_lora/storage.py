"""Reading small files, with one clear error line if they are damaged; writing files atomically, also in the cache."""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from pi_lora.errors import ModelError, PiLoraError, RunExistsError
from pi_lora.types import WRITTEN

T = TypeVar("T")
# What pydantic calls a value, and what a user writes.
PLAIN_WORDS = (
    (r"a valid tuple", "a list, as in [a, b]"),
    (r"a valid dictionary or instance of \w+", "a section with keys"),
    (r", unable to .*", ""),
)
SHOULD_BE = "input should be "
# A full disk, and a full quota.
FULL = (errno.ENOSPC, errno.EDQUOT)


def read_json(file: Path, kind: type[T], remedy: str) -> T:
    """Return the content of a JSON file as `kind`. Raise ModelError with the file, the field and the `remedy`."""
    try:
        return TypeAdapter(kind).validate_json(file.read_bytes())
    except ValidationError as error:
        raise ModelError(f"{file}: {first_problem(error)}; {remedy}") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); {remedy}") from None


def read_json_lines(file: Path) -> Iterator[Any]:
    """Yield the lines of a file of JSON, without those that a crash cut off or a disk damaged."""
    for line in file.read_bytes().splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def first_problem(error: ValidationError) -> str:
    """Return the first error: the field, the expected value, and the given value if it is short."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return f"is not JSON ({first['ctx']['error']})"
    field = ".".join(map(str, first["loc"]))
    text = problem_text(first)
    return f"{field}: {text}" if field else text


def problem_text(*alternatives: Mapping[str, Any]) -> str:
    """Return the message of one of pydantic's errors, or of those about all types that a value may have, with the given
    value if it is short.
    """
    messages = [_message_of(problem) for problem in alternatives]
    message = messages[0]
    if len(messages) > 1:
        kinds = dict.fromkeys(message.removeprefix(SHOULD_BE) for message in messages)
        message = SHOULD_BE + " or ".join(kinds)
    problem = alternatives[0]
    value = problem["input"]
    if problem["type"] in ("missing", "value_error") or not isinstance(value, str | int | float | None):
        return message
    # As in YAML, or on the command line.
    written = value if value and isinstance(value, str) else json.dumps(value)
    return f"{message}, not {written:.60}"


def _message_of(problem: Mapping[str, Any]) -> str:
    message: str = problem["msg"].removeprefix("Value error, ")
    for pattern, words in PLAIN_WORDS:
        message = re.sub(pattern, words, message)
    return message[0].lower() + message[1:]


def digest_of(content: Any) -> str:
    """Return a SHA-256 of JSON, the same for any order of keys."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def write_json(file: Path, content: Any, *, sort_keys: bool = False) -> None:
    """Write a JSON file atomically. Create the folder if it does not exist."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(content, indent=2, sort_keys=sort_keys) + "\n")


def check_can_write(*files: Path | None) -> None:
    """Raise OSError if one of `files` cannot be written, before hours are spent on the content."""
    for file in filter(None, files):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            file.open("ab").close()
        TemporaryFile(dir=file.parent).close()


def check_can_make(output: Path) -> None:
    """Raise RunExistsError if no folder can be made where `output` will be: in /proc, where all rights say yes, or on a
    full disk.
    """
    nearest = next(filter(Path.exists, output.resolve().parents))
    try:
        TemporaryDirectory(dir=nearest).cleanup()
    except OSError as error:
        reason = error.strerror
        raise RunExistsError(
            f"{output}: is in a place that cannot be written ({reason}); choose another --output"
        ) from None


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because a disk or a quota is full.

    safetensors and tokenizers name the number of the error in the text; torch only says that a write came out short.
    """
    if isinstance(error, OSError):
        return error.errno in FULL
    numbers = "|".join(map(str, FULL))
    pattern = rf"\(os error ({numbers})\)|inline_container.*(unexpected pos|file write failed)"
    return re.search(pattern, str(error)) is not None


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically: completely or not at all, even if the machine loses power."""
    part = file.with_name(f".{file.name}.part")
    part.unlink(missing_ok=True)  # do not follow a link
    try:
        with part.open("x", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
        WRITTEN.append(file)
    finally:
        part.unlink(missing_ok=True)


def written() -> list[Path]:
    """Return the files and folders that this command has written for the user and that are still there."""
    cache = cache_folder()
    paths = [path for path in dict.fromkeys(WRITTEN) if path.exists() and not path.absolute().is_relative_to(cache)]
    return [path for path in paths if not set(path.parents).intersection(paths)]


def cache_folder() -> Path:
    """Return `$PI_LORA_CACHE`, or `~/.cache/pi-lora`. The folder may be deleted while nothing runs."""
    folder = os.environ.get("PI_LORA_CACHE") or "~/.cache/pi-lora"
    try:
        return Path(folder).expanduser()
    except RuntimeError:  # a container's user without a name and HOME
        raise PiLoraError(f"{folder}: this user has no home folder; set HOME or PI_LORA_CACHE") from None


def cache_remedy(file: str) -> str | None:
    """Return the variables that move the caches that cannot be written at a file; None for other files."""
    from huggingface_hub import constants  # takes a while, and is for errors alone

    caches = {"HF_HOME": Path(constants.HF_HOME)}
    with suppress(PiLoraError):
        caches["PI_LORA_CACHE"] = cache_folder()
    variables = [
        name for name, folder in caches.items() if folder.is_relative_to(file) or Path(file).is_relative_to(folder)
    ]
    if not variables:
        return None
    return f"set {' and '.join(variables)} to a folder that can be written, or make room"
