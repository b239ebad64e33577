"""What all commands share: the application, its consoles, their options and the progress bar."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from pi_lora.errors import PiLoraError
from pi_lora.scaling.config import Method

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
eval_app = typer.Typer(no_args_is_help=True, help="Measure a model.")
app.add_typer(eval_app, name="eval")
out, err = Console(), Console(stderr=True)
LIBRARIES = "loading libraries"

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Keys to change.")]
ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, model folder, run folder or builtin:tiny.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there as well.")]
Original = Annotated[
    int | None, typer.Option(help="L, with --target: stretch a plain base first (the paper's step 0).")
]
Scaling = Annotated[Method | None, typer.Option(help="How a plain base is to read --target tokens.")]
Models = Annotated[
    list[str], typer.Argument(metavar="MODEL ...", help="Hub ids, model or run folders, or builtin:tiny.")
]
Target = Annotated[int | None, typer.Option(help="L', the window to stretch to.")]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Of the weights.")]


def stretch_of(original: int | None, target: int | None, scaling: Method | None) -> Any:
    """What `--original`, `--target` and `--scaling` ask of a plain base; None if they ask nothing."""
    from pi_lora.models.load import Stretch

    if target is None and (original is not None or scaling is not None):
        raise PiLoraError("--original, --scaling: go with --target, the window to stretch to; give it as well")
    return Stretch(target, original, scaling or "pi") if target else None


@contextlib.contextmanager
def progress_bar(title: str, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, on a terminal; yields the function that moves it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    name, last = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), last)
    with Progress(*columns, console=err, disable=quiet or not err.is_terminal) as bar:
        task = bar.add_task(title, total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=note)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Something turning on stderr, on a terminal, while `what` goes on."""
    if what != LIBRARIES:
        _work_begins()
    with err.status(what) if err.is_terminal else contextlib.nullcontext():
        yield
    _work_begins()


def _work_begins() -> None:
    """Let Ctrl-C unwind from here on: until libraries are loaded there is nothing to clean up."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
