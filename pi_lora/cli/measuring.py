"""What the commands that measure models share: how models are found, and what a user sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pi_lora.cli.app import out, progress_bar, say, working
from pi_lora.cli.options import Dtype, JsonFile, Original, Scaling, Target, Trust, extension_of
from pi_lora.distributed import is_launched, is_leader, join_processes
from pi_lora.errors import PiLoraError

if TYPE_CHECKING:
    from pi_lora.evaluation.suite import Display
    from pi_lora.models.model import Extension, Model
    from pi_lora.recipe.section import Section

S = TypeVar("S", bound="Section")


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

    @property
    def display(self) -> "Display":
        """What a user sees while models are measured."""
        from pi_lora.evaluation.suite import Display

        return Display(say, working, progress_bar)


@dataclass(frozen=True)
class Measuring(Loading):
    """How models are found, extended if they are plain bases, and loaded, and where their scores go."""

    original: Original = None
    target: Target = None
    scaling: Scaling = None
    json: JsonFile = None

    def find_extended(self, names: Sequence[str]) -> "list[Model]":
        """Find every model, as a base that is extended to `--target`, if given."""
        return self.find(*names, extension=extension_of(self.original, self.target, self.scaling))

    def report(self, name: str, found: "Sequence[Model]", options: Any, plot: Path | None = None) -> None:
        """Measure models alike, and write, print and draw their scores."""
        from pi_lora.evaluation.suite import evaluate
        from pi_lora.evaluation.table import scores_table

        scores = evaluate(name, found, options, dtype=self.dtype, json=self.json, plot=plot, display=self.display)
        if is_leader():
            out.print(scores_table(scores))


def options_of(kind: type[S], **values: Any) -> S:
    """Return options of the command line; raise PiLoraError for the first that is wrong."""
    from pydantic import ValidationError

    from pi_lora.writing import problem_text

    try:
        return kind(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        option = ".".join(map(str, problem["loc"])).replace("_", "-")
        raise PiLoraError(f"--{option}: {problem_text(problem)}" if option else f"--{problem_text(problem)}") from None
