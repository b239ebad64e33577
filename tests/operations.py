"""What a test does before each operation on files below a folder, in this process."""

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.symlink", "shutil.rmtree")
# Called with the number of the operation, from 1, its event and its file.
Before = Callable[[int, str, str], object]
watched: dict[str, Callable[[str, str], object]] = {}


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not watched or event not in EVENTS:
        return
    names = [os.fsdecode(each) for each in arguments[:2] if isinstance(each, (str, bytes, os.PathLike))]
    is_read = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    for folder, act in list(watched.items()):
        if any(name.startswith(folder) for name in names):
            act("read" if is_read else event, names[0])


@contextmanager
def before_each(folder: Path, act: Before, *, reads: bool = False) -> Iterator[None]:
    """Call `act` before each operation on files below `folder`; of files that are read if `reads`."""
    numbers = itertools.count(1)  # several threads may write

    def numbered(event: str, file: str) -> None:
        if reads or event != "read":
            act(next(numbers), event, file)

    if not hasattr(sys, "audited_by_tests"):  # audit hooks stay until the process ends
        sys.audited_by_tests = True
        sys.addaudithook(audit)
    watched[f"{folder}/"] = numbered
    try:
        yield
    finally:
        del watched[f"{folder}/"]
