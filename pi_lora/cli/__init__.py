"""The command line: one function a command, heavy imports inside the function."""

import contextlib
import io
import re
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from cyclopts import CycloptsError, MissingArgumentError
from pydantic import ValidationError

from pi_lora.cli import extend, measure, recipes  # noqa: F401
from pi_lora.cli.app import app
from pi_lora.distributed import enable_expandable_segments, is_to_report
from pi_lora.errors import Interrupted, PiLoraError, ScalingError, first_line
from pi_lora.storage import cache_remedy, problem_text, written
from pi_lora.terminal import TERMINAL, err
from pi_lora.types import WRITTEN, showing

__all__ = ["app", "main", "run"]

# In the help, the commands of a group are in the order in which they stand in these files; --help is last.
for place, name in enumerate(name for name in app if not name.startswith("-")):
    app[name].sort_key = place
INTERRUPTED = 130
# Packages that only an extra of pi-lora installs.
EXTRAS = {
    "matplotlib": "report",
    "markdown_it": "report",
    "lm_eval": "eval",
    "wonderwords": "eval",
    "rouge_score": "eval",
    "gguf": "gguf",
    "liger_kernel": "liger",
}
# The commands whose options extend a model: a message about a scaling names the option there, and elsewhere a key.
WITH_OPTIONS = ("extend", "eval", "probe", "search", "new")


def main() -> NoReturn:
    """Run a command; exit with 2 and one line for a user's mistake, 130 for an interruption, 1 for any other error."""
    enable_expandable_segments()
    WRITTEN.clear()
    # A terminal that is not UTF-8 gets escapes for what it cannot print.
    cast("io.TextIOWrapper", sys.stdout).reconfigure(errors="backslashreplace")
    try:
        run(sys.argv[1:])
    except CycloptsError as mistake:
        _fail(2, *_usage_problems(mistake))
    except KeyboardInterrupt:
        kept = ", ".join(map(str, written()))
        _fail(INTERRUPTED, f"interrupted; written before: {kept}" if kept else "interrupted; nothing was written")
    except Exception as error:  # the one place that turns an unforeseen exception into a line
        if not is_to_report(error):
            sys.exit()  # the launcher ends as the process that reports it
        if isinstance(error, OSError) and error.strerror:
            # A folder that nobody may read, a name that is too long, a full disk.
            remedy = cache_remedy(str(error.filename)) or "name another file or folder, or make room"
            _fail(2, f"{error.filename or 'pi-lora'}: {error.strerror}; {remedy}")
        package = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package in EXTRAS:
            _fail(2, f"pi-lora: needs the package {package}; pip install 'pi-lora[{EXTRAS[package]}]'")
        if not isinstance(error, PiLoraError):
            _fail(1, _unforeseen(error))
        problems: Sequence[str] = error.problems
        if isinstance(error, ScalingError) and sys.argv[1] in WITH_OPTIONS:
            problems = [re.sub(r"^context\.", "--", problem) for problem in problems]
        _fail(INTERRUPTED if isinstance(error, Interrupted) else 2, *problems)
    sys.exit()


def run(words: Sequence[str]) -> Any:
    """Run a command on the terminal; its errors are raised."""
    with showing(TERMINAL):
        return app(words, exit_on_error=False, print_error=False, result_action="return_value")


def _usage_problems(mistake: CycloptsError) -> list[str]:
    """Return the wrong options and their problems; of a group of options the first wrong one, or all that exclude each
    other.
    """
    if isinstance(mistake.__cause__, ValidationError):
        errors = mistake.__cause__.errors()
        place = errors[0]["loc"][:1]
        alternatives = [error for error in errors if (error["loc"][:1], error["input"]) == (place, errors[0]["input"])]
        option = ".".join(map(str, place)).replace("_", "-")
        lines = problem_text(*alternatives).splitlines()
        return [f"--{option}: {line}" if option else f"--{line}" for line in lines]
    command = " ".join(["pi-lora", *(mistake.command_chain or ())])
    if isinstance(mistake, MissingArgumentError) and mistake.argument:
        return [f"{command}: {mistake.argument.name}: missing; see {command} --help"]
    message = str(mistake).partition(" Available commands")[0].rstrip(".?")
    return [f"{command}: {message}; see {command} --help"]


def _unforeseen(error: Exception) -> str:
    """Write the traceback of an error that nobody foresaw to a file; return the line that names both."""
    with tempfile.NamedTemporaryFile("w", prefix="pi-lora-", suffix=".log", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    library = type(error).__module__.partition(".")[0]
    problem = f"{type(error).__name__}: {first_line(error)}"
    return f"pi-lora: {library}: {problem}; report it, and attach {file.name}"


def _fail(status: int, *messages: str) -> NoReturn:
    """Print messages, a line each although names may have line breaks, and exit."""
    lines = [err.wrapped(" ".join(message.splitlines())) for message in messages]
    with contextlib.suppress(OSError):  # a reader that is gone does not change how it ended
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    sys.exit(status)
