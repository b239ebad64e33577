"""The command line: one function a command, heavy imports inside the function."""

import sys
from typing import Annotated, cast

import typer

from pi_lora.cli import all as all_
from pi_lora.cli import benchmarks, env, merge, passkey, perplexity, push, recipes, report, summarization, theory, train
from pi_lora.cli.app import app, out
from pi_lora.errors import Interrupted, PiLoraError

__all__ = [
    "all_",
    "app",
    "benchmarks",
    "env",
    "main",
    "merge",
    "passkey",
    "perplexity",
    "push",
    "recipes",
    "report",
    "summarization",
    "theory",
    "train",
]

# Typer brings a click of its own; of its usage errors only this subclass has a public name.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
INTERRUPTED = 130


def _version(value: bool) -> None:
    if value:
        import importlib.metadata

        out.print(f"pi-lora {importlib.metadata.version('pi-lora')}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    """Stretch the context window of a RoPE language model by Position Interpolation: train, eval, merge."""


def main() -> None:
    """Run a command; a user's mistake is a line on stderr and exit status 2, an interruption 130."""
    try:
        status = app(standalone_mode=False)
    except PiLoraError as mistake:
        from pi_lora.distributed import report_outcome

        if report_outcome(mistake):
            sys.exit(0)
        _fail(str(mistake), INTERRUPTED if isinstance(mistake, Interrupted) else 2)
    except UsageError as mistake:
        _fail(f"pi-lora: {mistake.format_message()}; see pi-lora --help", 2)
    # Typer turns Ctrl-C into this status.
    if status == INTERRUPTED:
        _fail("interrupted; nothing was written", INTERRUPTED)
    sys.exit(status)


def _fail(message: str, status: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(status)
