"""What the commands that measure models share: all are found before one is measured, and one process reports."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pi_lora.cli.app import out, progress_bar, say, working
from pi_lora.cli.options import Dtype, JsonFile, Original, Scaling, Target, Trust, extension_of
from pi_lora.distributed import is_launched, is_leader, join_processes

if TYPE_CHECKING:
    from rich.table import Table

    from pi_lora.evaluation.results import Scores
    from pi_lora.evaluation.suite import Measure
    from pi_lora.models.model import Extension, Model

S = TypeVar("S")


@dataclass(frozen=True)
class Loading(Trust):
    """How models are found and loaded."""

    dtype: Dtype = None

    def find(self, *names: str, extension: "Extension | None" = None) -> "list[Model]":
        """Find every model, and meet the other processes of this command if a launcher started several."""
        from pi_lora.models.device import device
        from pi_lora.models.model import find

        found = [find(name, extension, self.permissions) for name in names]
        if is_launched():
            join_processes(cpu=device().type == "cpu")
        return found

    def load(self, model: "Model") -> "Model":
        """Load a model while something turns on the terminal."""
        with working(f"loading {model.name}"):
            return model.load(self.dtype)


@dataclass(frozen=True)
class Measuring(Loading):
    """How models are found, stretched if they are plain bases, loaded, and what becomes of their scores."""

    original: Original = None
    target: Target = None
    scaling: Scaling = None
    json: JsonFile = None

    def find_stretched(self, names: Sequence[str]) -> "list[Model]":
        """Find every model, as a base that is stretched to `--target`, if given."""
        return self.find(*names, extension=extension_of(self.original, self.target, self.scaling))

    def report(
        self,
        found: "Sequence[Model]",
        title: str,
        measure: Callable[[Any, Any], Any],
        *tables: "Callable[..., Table]",
        load: "Callable[[Model], Any] | None" = None,
        complete: Callable[[list[Any]], list[Any]] = list,
        picture: "Callable[[Any, Path], None] | None" = None,
        plot: Path | None = None,
    ) -> None:
        """Measure models and `complete` their scores; then one process of several writes, prints and draws them. Where
        nothing can be written is known before; what was measured is kept until it is.
        """
        from pi_lora.evaluation.journal import kept_until_written
        from pi_lora.evaluation.results import check_can_write, write_scores

        check_can_write(self.json, plot)
        with kept_until_written():
            scores = complete([measured(title, (load or self.load)(model), measure) for model in found])
            if not is_leader():
                return
            if self.json:
                write_scores(scores, self.json)
            for table in tables:
                out.print(table(*scores))
            if plot and picture:
                picture(scores, plot)


def warn_of_length(models: "Sequence[Model]", option: str, tokens: int) -> None:
    """Warn of models that are measured beyond the window that their scaling covers."""
    for each in models:
        if tokens > each.window:
            say(f"{option}: {tokens} tokens are more than the {each.window} that {each.name} covers; measured anyway")


def measured(title: str, model: Any, measure: Callable[[Any, Any], S]) -> S:
    """Return what `measure` finds of a model and a progress bar that it moves."""
    with progress_bar(f"{title} {model.name}") as progress:
        return measure(model, progress)


def measure_into(model: "Model", missing: "Mapping[str, Measure]", files: Mapping[str, Path]) -> "dict[str, Scores]":
    """Measure a model by name, and write each result as soon as it is known; return them."""
    from pi_lora.evaluation.journal import kept_until_written
    from pi_lora.evaluation.results import write_scores

    found = {}
    for name, measure in missing.items():
        with kept_until_written():
            found[name] = measured(name, model, measure)
            if is_leader() and name in files:
                write_scores(found[name], files[name])
    return found
