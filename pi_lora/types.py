"""Types that every room shares."""

from typing import Any, Protocol

Json = dict[str, Any]


class Progress(Protocol):
    """Called with how much is done, of how much, and a note about it."""

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Report."""


def silent(done: int, total: int, note: str = "") -> None:
    """Report no progress."""
