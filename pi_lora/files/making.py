"""Files and cached folders, made whole or not at all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from pi_lora.errors import PiLoraError


def write_whole(file: Path, text: str) -> None:
    """Write a file whole or not at all, also if the machine loses power."""
    part = file.with_name(f".{file.name}.part")
    part.unlink(missing_ok=True)  # a link that stands there is not followed
    with part.open("x", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(part, file)


def make_once(
    folder: Path,
    is_there: Callable[[], bool],
    make: Callable[[Path], None],
    problem: Callable[[str], PiLoraError],
    waiting: Callable[[], None] = lambda: None,
) -> None:
    """Let `make` fill a folder in the cache unless it `is_there`, by one process at a time, after `waiting` is called
    where another does. Raises a `problem` that says why the cache cannot be written, and what to do.
    """
    making = folder.with_suffix(".partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_suffix(".lock"))
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            waiting()
            held = lock.acquire()
        with held:
            if is_there():
                return
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            try:
                make(making)
                shutil.rmtree(folder, ignore_errors=True)
                making.rename(folder)
            finally:
                shutil.rmtree(making, ignore_errors=True)
    except OSError as error:
        advice = "make room, or name another folder in the environment variable PI_LORA_CACHE"
        raise problem(f"({error.strerror or error}); {advice}") from error
