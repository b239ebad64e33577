"""What the commands that measure models share: all are found before one is measured, and one process reports."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pi_lora.cli.app import err, progress_bar, working

if TYPE_CHECKING:
    from pi_lora.models.load import FoundModel, LoadedModel, Stretch

S = TypeVar("S")


def find_all(names: Sequence[str], stretch: "Stretch | None" = None) -> "list[FoundModel]":
    """Find every model, and meet the other processes of this command if a launcher started several.

    Raises:
        ModelError, ScalingError: one of them cannot be loaded or stretched.
    """
    from pi_lora.distributed import is_launched, join_processes
    from pi_lora.models.base import device
    from pi_lora.models.load import find

    found = [find(name, stretch) for name in names]
    if is_launched():
        join_processes(cpu=device().type == "cpu")
    return found


def warn_of_length(models: "Sequence[FoundModel]", option: str, tokens: int) -> None:
    """Warn of models that are measured beyond the window that their scaling covers."""
    for each in models:
        if tokens > each.window:
            covered = f"the {each.window} that {each.name} covers"
            say(f"{option}: {tokens} tokens are more than {covered}; measured all the same")


def loaded(model: "FoundModel", dtype: str | None) -> "LoadedModel":
    """Load a model while something turns on the terminal."""
    with working(f"loading {model.name}"):
        return model.load(dtype)


def measured(title: str, model: "LoadedModel", measure: "Callable[[LoadedModel, Any], S]") -> S:
    """Return what `measure` finds of a model and a progress bar that it moves."""
    from pi_lora.distributed import is_leader

    with progress_bar(f"{title} {model.name}", quiet=not is_leader()) as progress:
        return measure(model, progress)


def say(line: str) -> None:
    """Print a line on stderr, once however many processes there are."""
    from pi_lora.distributed import is_leader

    if is_leader():
        err.print(line, highlight=False, soft_wrap=True)
