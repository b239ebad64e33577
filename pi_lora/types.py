"""Types that every room shares."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

Json = dict[str, Any]
# The engines that serve a base under an override of its config.
Engine = Literal["llama.cpp", "mlx", "sglang", "transformers", "vllm"]
# The files and folders that this command has written, in the cache and elsewhere.
WRITTEN: list[Path] = []


@dataclass(frozen=True)
class Permissions:
    """Permissions that the user gives by a flag of a command; no file of a run or model can give them.

    Attributes:
        trust_remote_code: Run Python code that a model brings.
        allow_mismatch: Use a run although its base or data changed.
    """

    trust_remote_code: bool = False
    allow_mismatch: bool = False


NO_PERMISSIONS = Permissions()


# Called with the work that is done, all work (0 if nobody knows), and a note about it.
Progress: TypeAlias = Callable[[int, int, str], object]


def silent(done: int, total: int, note: str) -> None:
    """Report no progress."""


# The title of `UI.working` while libraries are imported.
LIBRARIES = "loading libraries"


@dataclass(frozen=True)
class UI:
    """The functions that show a user what happens; by default nothing is shown.

    Attributes:
        show: Print a line of the result.
        copy: Print a line that a user copies, unbroken.
        show_table: Print a table of rich.
        say: Print a message.
        working: Show that work is going on, under a title, while the context lasts.
        progress: Show a progress bar with a title; the context gives the function that moves it.
    """

    show: Callable[[str], object] = str
    copy: Callable[[str], object] = str
    show_table: Callable[[Any], object] = id
    say: Callable[[str], object] = str
    working: Callable[[str], AbstractContextManager[Any]] = nullcontext
    progress: Callable[[str], AbstractContextManager[Progress]] = lambda title: nullcontext(silent)


SILENT = UI()
current_ui: ContextVar[UI] = ContextVar("current_ui", default=SILENT)


class _CurrentUI:
    """The functions of the current UI, which the command line and calls with `progress=True` set."""

    def __getattr__(self, name: str) -> Any:
        return getattr(current_ui.get(), name)


ui = cast("UI", _CurrentUI())


@contextmanager
def showing(shown: UI) -> Iterator[None]:
    """Show the work of the context by other functions."""
    before = current_ui.set(shown)
    try:
        yield
    finally:
        current_ui.reset(before)
