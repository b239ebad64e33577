"""What a user sees: lines, what is worked on, and progress; on a terminal and where there is none."""

import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from textwrap import fill

from rich.console import Console
from rich.text import Text
from rich.theme import Theme

from pi_lora.distributed import is_main_process
from pi_lora.types import Progress, silent


class Terminal(Console):
    """A console that prints names, texts and messages as they are: no markup, no colours."""

    def __init__(self, stderr: bool = False) -> None:
        # A caption names the text and the settings: rich's dim italics are hard to read.
        theme = Theme({"table.caption": "none"})
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, theme=theme)

    def wrapped(self, line: object) -> str:
        """Return a line as it is, or on a terminal broken between words."""
        if not self.is_terminal:
            return str(line)
        return fill(str(line), self.width, break_long_words=False, break_on_hyphens=False)

    def lines(self, *lines: object) -> None:
        """Print lines of text."""
        self.commands(*map(self.wrapped, lines))

    def commands(self, *commands: str) -> None:
        """Print lines to be copied, which are not broken however long they are."""
        if commands:
            self.print(*commands, sep="\n", soft_wrap=True)


out, err = Terminal(), Terminal(stderr=True)
LIBRARIES = "loading libraries"
# Seconds between lines of progress, and when the last one was printed.
EACH_LINE = 60.0
_last_line = time.monotonic()
# Seconds after which a command says what it is doing, without a terminal.
LONG = 10.0


def say(line: str) -> None:
    """Print a line on stderr, once however many processes there are."""
    if is_main_process():
        err.lines(line)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A progress bar on stderr, or lines where that is no terminal, of the first of several processes; yields the
    function that moves it.
    """
    if not (is_main_process() and err.is_terminal):
        yield _progress_lines(title) if is_main_process() else silent
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
    err.file = sys.stderr  # as it is now: while lm-eval works, sys.stderr leads nowhere
    with Bar(*columns, console=err) as bar:
        task = bar.add_task(title, total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)
        bar.update(task, visible=bar.tasks[0].total is not None)  # nothing was left to do


def _progress_lines(title: str) -> Progress:
    """Return what prints a line a minute, however many bars a command has."""
    started, first = time.monotonic(), -1
    stream = sys.stderr  # as it is now

    def report(done: int, total: int, note: str = "") -> None:
        global _last_line
        nonlocal first
        now = time.monotonic()
        first = done if first < 0 else first
        if now - _last_line < EACH_LINE or done == first:
            return
        _last_line = now
        pace = (now - started) / max(1, done - first)
        left = timedelta(seconds=round(pace * (total - done)))
        # A reader that is gone ends nothing; rich would end the process.
        with contextlib.suppress(OSError):
            print(f"{title}: {done:,} of {total:,}, {left} left{note and f', {note}'}", file=stream, flush=True)

    return report


@contextlib.contextmanager
def working(what: str = LIBRARIES) -> Iterator[None]:
    """Show a spinner on stderr while `what` runs; without a terminal, print a line if it takes long."""
    if what != LIBRARIES:
        _work_begins()
    with contextlib.ExitStack() as signs:
        if what == LIBRARIES:
            # Their hundred thousands of objects stay: to look for garbage among them, now and at the end, takes a third
            # of the time of loading them. `pi_lora.__main__` has turned that off.
            signs.callback(gc.enable)
            signs.callback(gc.freeze)
        if err.is_terminal:
            signs.enter_context(err.status(Text(what)))
        elif is_main_process():
            line = threading.Timer(LONG, print, (f"{what} ...",), {"file": sys.stderr, "flush": True})
            line.daemon = True
            line.start()
            signs.callback(line.cancel)
        yield
    _work_begins()


def _work_begins() -> None:
    """Raise KeyboardInterrupt on Ctrl-C from now on. Before libraries are loaded there is nothing to clean up."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
