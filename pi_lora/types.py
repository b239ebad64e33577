"""Types that every room shares."""

from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True)
class Permissions:
    """What only the person at the keyboard can permit, by a flag of the command: no file of a run or model does.

    Attributes:
        remote_code: Python code that a model brings is run.
        changed: A run is used although its base, tokenizer or data are not what they were.
    """

    remote_code: bool = False
    changed: bool = False


NO_PERMISSIONS = Permissions()


class Progress(Protocol):
    """Called with how much is done, of how much, and a note about it."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Report."""


def silent(done: int, total: int, note: str = "") -> None:
    """Report no progress."""
