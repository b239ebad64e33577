"""Options that several commands have: their types, and groups of them, which a command takes as one parameter."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from pi_lora.errors import PiLoraError
from pi_lora.recipe.places import find_recipe
from pi_lora.scaling.config import Method
from pi_lora.types import Permissions

# No window is longer.
MOST_TOKENS = 10**9


RecipeFile = Annotated[Path, Argument(metavar="RECIPE", callback=find_recipe, help="A file, or a name of pi-lora's.")]
Overrides = Annotated[list[str] | None, Argument(metavar="[key=value ...]", help="Keys to change.")]
ModelName = Annotated[str, Argument(metavar="MODEL", help="Hub id, folder, run, GGUF file or builtin:tiny.")]
Models = Annotated[list[str], Argument(metavar="MODEL ...", help="Hub ids, folders, runs, GGUF files or builtin:tiny.")]
JsonFile = Annotated[Path | None, Option("--json", metavar="FILE", help="Write the result there as well.")]
Plot = Annotated[Path | None, Option(metavar="FILE", help="Draw the scores, a PNG.")]
Original = Annotated[int | None, Option(min=1, max=MOST_TOKENS, help="L of a plain base, if not its config's.")]
Target = Annotated[int | None, Option(min=1, max=MOST_TOKENS, help="L', to stretch a plain base to (step 0).")]
Scaling = Annotated[Method | None, Option(help="How a plain base is to read --target tokens.")]
TrustRemoteCode = Annotated[bool, Option("--trust-remote-code", help="Run Python code that a model brings.")]
AllowChanged = Annotated[bool, Option("--allow-changed", help="Use a run though its base or data changed.")]
Seed = Annotated[int, Option(min=0, max=2**32 - 1)]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"] | None, Option(help="Of the weights.")]
GpuName = Annotated[str | None, Option(metavar="NAME", help="As 4090 or H100; any by its memory, as 48GB; or cpu.")]
TaskFiles = Annotated[
    list[str] | None, Option(metavar="TASK=FILE", help="A file in the data set's schema, not the hub's.")
]
Again = Annotated[bool, Option("--again", help="Measure also what has been.")]


@dataclasses.dataclass(frozen=True)
class Trust:
    """What only the person at the keyboard can permit."""

    trust_remote_code: TrustRemoteCode = False
    allow_changed: AllowChanged = False

    @property
    def permissions(self) -> Permissions:
        """The same for functions."""
        return Permissions(self.trust_remote_code, self.allow_changed)


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options of its groups, parameters that are dataclasses, in their place and last."""
    parameters = inspect.signature(command).parameters.values()
    groups: dict[str, Any] = {x.name: x.annotation for x in parameters if dataclasses.is_dataclass(x.annotation)}

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    own = [each for each in parameters if each.name not in groups]
    of_groups = [each for group in groups.values() for each in inspect.signature(group).parameters.values()]
    vars(flat)["__signature__"] = inspect.Signature([*own, *of_groups])  # which typer reads
    return flat


def extension_of(original: int | None, target: int | None, scaling: Method | None) -> Any:
    """What `--original`, `--target` and `--scaling` ask of a plain base; None if they ask nothing."""
    from pi_lora.models.model import Extension

    if target is None and (original is not None or scaling is not None):
        raise PiLoraError("--original, --scaling: go with --target, the window to stretch to; give it as well")
    return Extension(target, original, scaling or "pi") if target else None


def lengths_in(option: str, text: str | None) -> list[int]:
    """Return lengths in tokens, written as 2048,4096, the shortest first."""
    if text is None:
        return []
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = [0]
    if lengths[0] < 2 or lengths[-1] > MOST_TOKENS:
        raise PiLoraError(f"{option}: {text}: not lengths in tokens; write them as 2048,4096")
    return lengths
