"""Types that every room shares."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True)
class Permissions:
    """What only the person at the keyboard can permit, by a flag of the command: no file of a run or model does.

    Attributes:
        trust_remote_code: Run Python code that a model brings.
        allow_mismatch: Use a run although its base or data changed.
    """

    trust_remote_code: bool = False
    allow_mismatch: bool = False


NO_PERMISSIONS = Permissions()


class Progress(Protocol):
    """Called with how much is done, of how much, and a note about it."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Report."""


def silent(done: int, total: int, note: str = "") -> None:
    """Report no progress."""


@dataclass(frozen=True)
class How:
    """How models are measured: `again` although scores exist, in `dtype`, and by which functions a user is shown lines
    (`say`), the current work (`working`) and progress bars (`progress`); by default nothing is shown.
    """

    again: bool = False
    dtype: str | None = None
    say: Callable[[str], object] = str
    working: Callable[[str], AbstractContextManager[Any]] = nullcontext
    progress: Callable[[str], AbstractContextManager[Progress]] = lambda title: nullcontext(silent)
