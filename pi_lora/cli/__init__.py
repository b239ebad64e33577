"""The command line: one function a command, heavy imports inside the function."""

import importlib.metadata
import pkgutil
import sys
from typing import Annotated, NoReturn, cast

import typer

from pi_lora.cli.app import app, out
from pi_lora.errors import Interrupted, PiLoraError

__all__ = ["app", "main"]

for file in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(file.name)

# Typer brings a click of its own; of its usage errors only this subclass has a public name.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
INTERRUPTED = 130


def _version(value: bool) -> None:
    if value:
        out.print(f"pi-lora {importlib.metadata.version('pi-lora')}", highlight=False)
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")]


@app.callback()
def options(version: Version = False) -> None:
    """Stretch the context window of a RoPE language model by Position Interpolation: train, eval, merge."""


def main() -> None:
    """Run a command; a user's mistake is a line on stderr and exit status 2, an interruption 130."""
    try:
        status = app(standalone_mode=False)
    except UsageError as mistake:
        _fail(f"pi-lora: {mistake.format_message()}; see pi-lora --help", 2)
    except Exception as ending:
        from pi_lora.distributed import status_of

        # The process that launched this one may speak for it.
        if (status := status_of(ending)) is not None:
            sys.exit(status)
        if not isinstance(ending, PiLoraError):
            raise
        _fail(str(ending), INTERRUPTED if isinstance(ending, Interrupted) else 2)
    # Typer turns Ctrl-C into this status.
    if status == INTERRUPTED:
        _fail("interrupted; nothing was written", INTERRUPTED)
    sys.exit(status)


def _fail(message: str, status: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(status)
