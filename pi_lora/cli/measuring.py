"""What the commands that measure models share: all are found before one is measured, and one process reports."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pi_lora.cli.app import err, out, progress_bar, working
from pi_lora.types import Allowed

if TYPE_CHECKING:
    from rich.table import Table

    from pi_lora.evaluation.results import Scores
    from pi_lora.evaluation.suite import Measure
    from pi_lora.models.load import FoundModel, LoadedModel, Stretch

S = TypeVar("S")


def find_all(names: Sequence[str], stretch: "Stretch | None", allowed: Allowed) -> "list[FoundModel]":
    """Find every model, and meet the other processes of this command if a launcher started several."""
    from pi_lora.distributed import is_launched, join_processes
    from pi_lora.models.device import device
    from pi_lora.models.load import find

    found = [find(name, stretch, allowed) for name in names]
    if is_launched():
        join_processes(cpu=device().type == "cpu")
    return found


def warn_of_length(models: "Sequence[FoundModel]", option: str, tokens: int) -> None:
    """Warn of models that are measured beyond the window that their scaling covers."""
    for each in models:
        if tokens > each.window:
            say(f"{option}: {tokens} tokens are more than the {each.window} that {each.name} covers; measured anyway")


def loaded(model: "FoundModel", dtype: str | None) -> "LoadedModel":
    """Load a model while something turns on the terminal."""
    with working(f"loading {model.name}"):
        return model.load(dtype)


def measured(title: str, model: "LoadedModel", measure: "Callable[[LoadedModel, Any], S]") -> S:
    """Return what `measure` finds of a model and a progress bar that it moves."""
    from pi_lora.distributed import is_leader

    with progress_bar(f"{title} {model.name}", quiet=not is_leader()) as progress:
        return measure(model, progress)


def measure_into(
    model: "LoadedModel", missing: "Mapping[str, Measure]", files: Mapping[str, Path]
) -> "dict[str, Scores]":
    """Measure a model by name, and write each result as soon as it is known; return them."""
    from pi_lora.distributed import is_leader
    from pi_lora.evaluation.journal import kept_until_written
    from pi_lora.evaluation.results import write_scores

    found = {}
    for name, measure in missing.items():
        with kept_until_written():
            found[name] = measured(name, model, measure)
            if is_leader() and name in files:
                write_scores(found[name], files[name])
    return found


def report(
    scores: "Callable[[], Sequence[Any]]",
    json: Path | None,
    *tables: "Callable[..., Table]",
    picture: "Callable[[Any, Path], None] | None" = None,
    plot: Path | None = None,
) -> None:
    """Measure several models, then write, print and draw their scores in one process of several. Where nothing can be
    written is known before; what was measured is kept until it is.
    """
    from pi_lora.distributed import is_leader
    from pi_lora.evaluation.journal import kept_until_written
    from pi_lora.evaluation.results import check_can_write, write_scores

    check_can_write(json, plot)
    with kept_until_written():
        found = scores()
        if not is_leader():
            return
        if json:
            write_scores(found, json)
        for table in tables:
            out.print(table(*found))
        if plot and picture:
            picture(found, plot)


def say(line: str) -> None:
    """Print a line on stderr, once however many processes there are."""
    from pi_lora.distributed import is_leader

    if is_leader():
        err.print(line, soft_wrap=True)
