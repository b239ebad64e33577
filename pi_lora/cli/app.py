"""The application, and the options that several commands have."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter, Token

from pi_lora.model_ref import ModelRef
from pi_lora.recipe.factors import read_factors
from pi_lora.recipe.schema import Dtype
from pi_lora.recipe.section import as_tokens
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.scalings import Method
from pi_lora.types import Permissions


def _shown_default(value: object) -> str | None:
    """Return a default as the help shows it; None if it is not worth showing."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or None
    return None if value is None or value is False else str(value)


app = App(
    name="pi-lora",
    help="Extend the context window of a RoPE language model: train, eval, merge.",
    version=lambda: f"pi-lora {importlib.metadata.version('pi-lora')}",
    help_format="plaintext",
    default_parameter=Parameter(negative=(), show_default=_shown_default),
    suppress_keyboard_interrupt=False,
)
# The groups of commands in the help, in this order.
EXTEND = Group.create_ordered("Extend")
MEASURE = Group.create_ordered("Measure and share")
RECIPES = Group.create_ordered("Recipes")
OTHERS = Group.create_ordered("Others")
app["--help"].group = app["--version"].group = OTHERS

# A pydantic model or dataclass under this annotation is a group: its fields are options of the command.
GROUP = Parameter(name="*")

RecipeFile = Annotated[Path, Parameter(name="RECIPE", help="Recipe file, or the name of a shipped recipe.")]
Override = Annotated[str, Parameter(name="KEY=VALUE", help="Recipe keys to override, as training.steps=200.")]
ModelName = Annotated[str, Parameter(name="MODEL", help="Hub id, folder, run or builtin:tiny.")]
BaseName = Annotated[str, Parameter(name="MODEL", help="Hub id, folder of full weights, or builtin:tiny.")]
JsonFile = Annotated[Path | None, Parameter(help="Also write the result to this file.")]


def read_length(_: object, tokens: Sequence[Token]) -> int:
    """Return a number of tokens from `16k` or `16384`."""
    length = as_tokens(tokens[0].value)
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"{tokens[0].value} is not a number of tokens; write 16384 or 16k")
    return length


NewWindow = Annotated[int, Parameter(converter=read_length, help="L', the window to extend to, as 16384 or 16k.")]
Original = Annotated[
    int | None, Parameter(converter=read_length, help="Original window of a base; by default that of its training.")
]
Target = Annotated[
    int | None, Parameter(converter=read_length, help="Extend a plain base to this window, without tuning.")
]
FactorsFile = Annotated[Path | None, Parameter(help="For --scaling factors: the file that pi-lora search wrote.")]
Probe = Annotated[Path | None, Parameter(help="The JSON file that pi-lora probe wrote.")]
TrustCode = Annotated[bool, Parameter(help="Run Python code that a model brings.")]
DtypeName = Annotated[Dtype | None, Parameter(help="Data type of the weights.")]


@dataclass(frozen=True)
class RunOptions(Permissions):
    """Options of a model that may be a run."""

    base: Annotated[str | None, Parameter(help="New place of the base of a run, if it moved.")] = None

    def ref(self, name: str | Path, extension: Extension | None = None) -> ModelRef:
        """Return the model that the user means by a name and these options."""
        return ModelRef(name, extension=extension, **vars(self))


@dataclass(frozen=True)
class LoadOptions(RunOptions):
    """Options of a model whose weights are loaded."""

    dtype: DtypeName = None


@dataclass(frozen=True)
class ScalingOptions:
    """Options of the extension of a plain base."""

    original: Original = None
    scaling: Annotated[
        Method | None,
        Parameter(help="Scaling of a plain base, which is extended to --target; pi or factors by default."),
    ] = None
    factors: FactorsFile = None

    def extension(self, target: int) -> Extension:
        """Return the extension to a target window."""
        default: Method = "factors" if self.factors else "pi"
        divisors = read_factors(self.factors).model_dump() if self.factors else {}
        return Extension(target, self.original, self.scaling or default, **divisors)


OfRun = Annotated[RunOptions, GROUP]
Loaded = Annotated[LoadOptions, GROUP]
