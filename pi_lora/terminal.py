"""Output for the user: lines, spinners and progress bars, on a terminal and without one."""

import contextlib
import gc
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from textwrap import fill
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.theme import Theme

from pi_lora.distributed import is_main_process
from pi_lora.types import LIBRARIES, UI, Progress, silent


class Terminal(Console):
    """The console of the main process, which prints names, texts and messages as they are: no markup, no colours."""

    def __init__(self, stderr: bool = False) -> None:
        # Captions name the text and the settings; the dim italics of rich are hard to read.
        theme = Theme({"table.caption": "none"})
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, theme=theme)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print in the main process only, so that a line appears once however many processes there are."""
        if is_main_process():
            super().print(*objects, **options)

    def wrapped(self, line: object) -> str:
        """Return a line, on a terminal wrapped between words."""
        text = str(line)
        if not self.is_terminal:
            return text
        return fill(text, self.width, break_long_words=False, break_on_hyphens=False)

    def lines(self, *lines: object) -> None:
        """Print lines of text."""
        self.commands(*map(self.wrapped, lines))

    def commands(self, *commands: str) -> None:
        """Print lines that users copy, so long lines are not wrapped."""
        self.print(*commands, sep="\n", soft_wrap=True)


out = Terminal()
err = Terminal(stderr=True)
# Seconds between lines of progress without a terminal.
LINE_INTERVAL = 60.0
# The time of the last line of progress.
_last_line = time.monotonic()
# Seconds after which `working` prints a line without a terminal.
LONG = 10.0


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """Show a progress bar on stderr, or print lines without a terminal, in the main process only. Yield the function
    that reports progress.
    """
    if not is_main_process():
        yield silent
        return
    if not err.is_terminal:
        yield _progress_lines(title)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    unwrapped = Column(no_wrap=True)
    bar_width = max(8, min(40, err.width - 80))  # the numbers and the note come first
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width),
        MofNCompleteColumn(table_column=unwrapped),
        TimeRemainingColumn(table_column=unwrapped),
        TextColumn("{task.fields[note]}", markup=False, table_column=Column()),
    )
    err.file = sys.stderr  # the stream of now: lm-eval replaces sys.stderr while it runs
    with Bar(*columns, console=err) as bar:
        task = bar.add_task(title, total=None, note="")

        def report(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done, total=total or None, note=note)

        yield report
        has_started = bar.tasks[0].total is not None or bar.tasks[0].completed > 0
        bar.update(task, visible=has_started)


def _progress_lines(title: str) -> Progress:
    """Return a function that prints progress, at most a line a minute over all bars of a command."""
    started = time.monotonic()
    first: int | None = None
    stream = sys.stderr  # the stream of now

    def report(done: int, total: int, note: str) -> None:
        global _last_line
        nonlocal first
        if first is None:
            first = done
        now = time.monotonic()
        if now - _last_line < LINE_INTERVAL or done == first:
            return
        _last_line = now
        line = f"{title}: {done:,}"
        if total:
            seconds_per_unit = (now - started) / max(1, done - first)
            left = timedelta(seconds=round(seconds_per_unit * (total - done)))
            line += f" of {total:,}, {left} left"
        if note:
            line += f", {note}"
        # The process goes on if the reader has ended; rich would end the process.
        with contextlib.suppress(OSError):
            print(line, file=stream, flush=True)

    return report


@contextlib.contextmanager
def working(what: str = LIBRARIES) -> Iterator[None]:
    """Show a spinner on stderr while `what` runs; without a terminal, print a line if it takes long."""
    if what != LIBRARIES:
        _work_begins()
    with contextlib.ExitStack() as stack:
        if what == LIBRARIES:
            # Libraries create hundred thousands of objects that stay. Looking for garbage among them takes a third of
            # the loading time, so `pi_lora.__main__` has turned the collector off; freezing keeps them out of it.
            stack.callback(gc.enable)
            stack.callback(gc.freeze)
        if err.is_terminal:
            stack.enter_context(err.status(Text(what)))
        elif is_main_process():
            timer = threading.Timer(LONG, print, (f"{what} ...",), {"file": sys.stderr, "flush": True})
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
        yield
    _work_begins()


def _work_begins() -> None:
    """Raise KeyboardInterrupt on Ctrl-C from now on. Before libraries are loaded there is nothing to clean up."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


TERMINAL = UI(
    show=out.lines,
    copy=out.commands,
    show_table=out.print,
    say=err.lines,
    working=working,
    progress=progress_bar,
)
