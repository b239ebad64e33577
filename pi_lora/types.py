"""Types that every room shares."""

from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True)
class Allowed:
    """What only the person at the keyboard can allow, by a flag of the command: no file of a run or model does.
    `changed`: a run is used although its base, tokenizer or data are not what they were.
    """

    remote_code: bool = False
    changed: bool = False


NOTHING = Allowed()


class Progress(Protocol):
    """Called with how much is done, of how much, and a note about it."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Report."""


def silent(done: int, total: int, note: str = "") -> None:
    """Report no progress."""
