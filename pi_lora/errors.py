"""Errors that a user can correct, one line each: where, what is wrong, what to do."""

from collections.abc import Sequence


class PiLoraError(Exception):
    """An error that the user can correct: a mistake, or several, a line each. The command line prints it without a
    traceback and exits with 2.
    """

    def __str__(self) -> str:
        return "\n".join(self.problems)

    @property
    def problems(self) -> tuple[str, ...]:
        """The mistakes, a line each."""
        return self.args


class RecipeError(PiLoraError):
    """All mistakes of one recipe together, a line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(*problems)


class ScalingError(PiLoraError):
    """A model whose positions cannot be interpolated."""


class ModelError(PiLoraError):
    """A model, adapter or run folder that is missing, incomplete or does not match."""


class DataError(PiLoraError):
    """Text that is missing, unreadable or too short."""


class RunExistsError(PiLoraError):
    """An output folder that is not empty; nothing is overwritten."""


class Diverged(PiLoraError):
    """The loss became infinite or NaN; earlier checkpoints are kept."""


class Interrupted(PiLoraError):
    """An interruption after what was done so far was kept; the message says how to continue. Exit status 130."""


def last_line(error: BaseException) -> str:
    """Return the last line of an error's message, or what kind of error it is."""
    message = str(error).strip() or repr(error)
    return message.splitlines()[-1].strip()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with the next one after a colon, or what kind of error it is."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error  # a KeyError's text is a repr
    first, *others = (str(message).strip() or type(error).__name__).splitlines()
    if first.endswith(":") and others:
        first = f"{first} {others[0].strip()}"
    return first.rstrip(".")
