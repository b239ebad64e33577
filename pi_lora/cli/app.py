"""What all commands share: the application, its consoles and the progress bar."""

import contextlib
import importlib.metadata
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App, Group, Parameter
from rich.console import Console
from rich.text import Text

from pi_lora.distributed import is_leader
from pi_lora.recipe.places import find_recipe
from pi_lora.types import Progress, silent

if TYPE_CHECKING:
    from pi_lora.recipe.files import ResolvedRecipe


class Terminal(Console):
    """A console that prints names, texts and messages as they are: no markup, no colours."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def lines(self, *lines: object) -> None:
        """Print lines, which are not broken however long they are."""
        self.print(*map(str, lines), sep="\n", soft_wrap=True)


def _shown_default(value: object) -> str | None:
    """Return a default as the help shows it; None if it is not worth showing."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or None
    return None if value is None or value is False else str(value)


app = App(
    name="pi-lora",
    help="Extend the context window of a RoPE language model: train, eval, merge.",
    version=lambda: f"pi-lora {importlib.metadata.version('pi-lora')}",
    help_format="plaintext",
    default_parameter=Parameter(negative=(), show_default=_shown_default),
    suppress_keyboard_interrupt=False,
)
# The groups of commands in the help, in this order; in a group, commands are in the order of their sort_key.
EXTEND, MEASURE, RECIPES, OTHERS = (
    Group(name, sort_key=place) for place, name in enumerate(("Extend", "Measure and share", "Recipes", "Others"))
)
eval_app = App(name="eval", help="Measure a model, or several with the same options.", group=MEASURE, sort_key=1)
app.command(eval_app)
app["--help"].group = app["--version"].group = OTHERS
out, err = Terminal(), Terminal(stderr=True)
LIBRARIES = "loading libraries"
# Seconds between lines of progress.
EACH_LINE = 60.0
# Seconds after which a command says what it does.
LONG = 10.0


def read_recipe(recipe: Path, overrides: Sequence[str] = ()) -> "ResolvedRecipe":
    """Read a recipe file, or a shipped recipe by name, with the overrides of the command line."""
    from pi_lora.recipe.files import load_recipe

    return load_recipe(find_recipe(recipe), overrides)


def say(line: str) -> None:
    """Print a line on stderr, once however many processes there are."""
    if is_leader():
        err.lines(line)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A progress bar on stderr, or lines where that is no terminal, of the first of several processes; yields the
    function that moves it.
    """
    if not (is_leader() and err.is_terminal):
        yield _progress_lines(title) if is_leader() else silent
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    whole, wrapped = Column(no_wrap=True), Column()
    columns = (
        TextColumn("{task.description}", markup=False, table_column=whole),
        BarColumn(max(8, min(40, err.width - 80))),  # the numbers and the note come first
        MofNCompleteColumn(table_column=whole),
        TimeRemainingColumn(table_column=whole),
        TextColumn("{task.fields[note]}", markup=False, table_column=wrapped),
    )
    with Bar(*columns, console=err) as bar:
        task = bar.add_task(title, total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)


def _progress_lines(title: str) -> Progress:
    """Return what prints a line a minute."""
    started = last = time.monotonic()
    first = -1
    stream = sys.stderr  # as it is now: while lm-eval works it leads nowhere

    def report(done: int, total: int, note: str = "") -> None:
        nonlocal first, last
        now = time.monotonic()
        first = done if first < 0 else first
        if now - last < EACH_LINE:
            return
        last = now
        pace = (now - started) / max(1, done - first)
        left = timedelta(seconds=round(pace * (total - done)))
        # A reader that is gone ends nothing; rich would end the process.
        with contextlib.suppress(OSError):
            print(f"{title}: {done:,} of {total:,}, {left} left{note and f', {note}'}", file=stream, flush=True)

    return report


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Something turning on stderr while `what` goes on, or where that is no terminal a line if it takes long."""
    if what != LIBRARIES:
        _work_begins()
    with contextlib.ExitStack() as signs:
        if err.is_terminal:
            signs.enter_context(err.status(Text(what)))
        elif is_leader():
            line = threading.Timer(LONG, print, (f"{what} ...",), {"file": sys.stderr, "flush": True})
            line.daemon = True
            line.start()
            signs.callback(line.cancel)
        yield
    _work_begins()


def _work_begins() -> None:
    """Let Ctrl-C unwind from here on: until libraries are loaded there is nothing to clean up."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
