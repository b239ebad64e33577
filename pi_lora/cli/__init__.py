"""The command line: one function a command, heavy imports inside the function."""

import contextlib
import importlib.metadata
import io
import pkgutil
import sys
import tempfile
import traceback
from typing import Annotated, NoReturn, cast

import typer
from typer import Option

from pi_lora.cli.app import LIBRARIES, app, out, printable, working
from pi_lora.distributed import let_segments_grow, worker_exit_status
from pi_lora.errors import Interrupted, PiLoraError, RecipeError

__all__ = ["app", "main"]

for file in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(file.name)

# Typer brings a click of its own; of its usage errors only this subclass has a public name.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
INTERRUPTED = 130


def _version(value: bool) -> None:
    if value:
        out.print(f"pi-lora {importlib.metadata.version('pi-lora')}")
        raise typer.Exit


Version = Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print it and exit.")]


@app.callback()
def about(version: Version = False) -> None:
    """Stretch the context window of a RoPE language model by Position Interpolation: train, eval, merge."""


@app.command()
def env() -> None:
    """Print what a report of a bug needs: versions, processor, memory, GPUs, kernels."""
    with working(LIBRARIES):
        from pi_lora.models.machine import facts
        from pi_lora.recipe.places import cache_folder

        found = {**facts(), "cache": str(cache_folder())}
    width = max(map(len, found))
    for name, value in found.items():
        out.lines(f"{name:{width}}  {value}")


def main() -> None:
    """Run a command; a user's mistake is a line on stderr and exit status 2, an interruption 130."""
    let_segments_grow()
    # A terminal that is not UTF-8 gets escapes for what it cannot print.
    cast("io.TextIOWrapper", sys.stdout).reconfigure(errors="backslashreplace")
    try:
        status = app(standalone_mode=False)
    except UsageError as mistake:
        _fail(f"pi-lora: {_in_a_line(mistake.format_message())}; see pi-lora --help", 2)
    except Exception as ending:
        # The process that launched this one may speak for it.
        if (status := worker_exit_status(ending)) is not None:
            sys.exit(status)
        if isinstance(ending, OSError) and ending.strerror:
            # A folder that nobody may read, a name that is too long, a full disk.
            refused = f"{ending.filename or 'pi-lora'}: {ending.strerror}; name another file or folder, or make room"
            _fail(_in_a_line(refused), 2)
        if not isinstance(ending, PiLoraError):
            _fail(_unforeseen(ending), 1)
        lines = ending.problems if isinstance(ending, RecipeError) else [str(ending)]
        _fail("\n".join(map(_in_a_line, lines)), INTERRUPTED if isinstance(ending, Interrupted) else 2)
    # Typer turns Ctrl-C into this status.
    if status == INTERRUPTED:
        _fail("interrupted; nothing was written", INTERRUPTED)
    sys.exit(status)


def _unforeseen(error: Exception) -> str:
    """Write the traceback of an error that nobody foresaw to a file; return the line that names both."""
    with tempfile.NamedTemporaryFile("w", prefix="pi-lora-", suffix=".log", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    library, first = type(error).__module__.partition(".")[0], next(iter(str(error).splitlines()), "")
    return f"pi-lora: {library}: {type(error).__name__}: {first}; send {file.name} with a report of it"


def _in_a_line(message: str) -> str:
    """Names may have line breaks."""
    return " ".join(message.splitlines())


def _fail(message: str, status: int) -> NoReturn:
    with contextlib.suppress(OSError):  # a reader that is gone does not change how it ended
        print(printable(message), file=sys.stderr, flush=True)
    sys.exit(status)
