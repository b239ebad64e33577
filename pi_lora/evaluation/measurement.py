"""What a measurement is: options and a model in, typed scores out, and the metrics in them that everything else shows:
the terminal's table, the model card, the hub, and the comparison of a run with its base.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from pi_lora.drawing import Panel
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.metrics import Metric
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import Options
from pi_lora.types import Json


class Result(BaseModel):
    """A part of a result; only fields that were set are written, and fields of later versions are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class Scores(Result):
    """What every result says of its model: name, scale L'/L, dtype, attention kernel, window in tokens, step; and the
    options it was measured with, complete, which measure another model in the same way. Files written before options
    were kept have None, and compare with no others.
    """

    measurement: ClassVar[str]

    model: str
    scale: float = 1.0
    dtype: str | None = None
    kernel: str | None = None
    quantized_kernel: str | None = None
    window: int | None = None
    step: int | None = None
    options: Any = None


Asked = TypeVar("Asked", bound=Options)
Found = TypeVar("Found", bound=Scores)


class Measurement(Protocol[Asked, Found]):
    """A measurement: `name` is the section of a recipe, the command, and the file in a run's scores.

    A new one is a module with its scores and a class like this, its options in `pi_lora.recipe.evaluation`, and one
    line in `pi_lora.evaluation.registry`.
    """

    name: str
    options: type[Asked]
    scores: type[Found]

    def prepare(self, options: Asked, models: Sequence[Model]) -> Asked:
        """Return the options with defaults that depend on the models filled in, so that all are measured alike. Raise
        PiLoraError for what shows before weights are read: a missing package, a data set that cannot be read.
        """
        return options

    def run(self, model: Model, options: Asked, session: Session) -> Found:
        """Measure a model; `options` need not be prepared."""

    def metrics(self, scores: Found) -> list[Metric]:
        """Return the metrics in the order of the table."""

    def about(self, scores: Sequence[Found]) -> str:
        """Return how several models were measured, for the caption of their table."""

    def panels(self, scores: Mapping[str, Found]) -> list[Panel]:
        """Return the functions that draw the scores of several models by label, each on matplotlib axes of its own."""
        return []


def as_json(result: BaseModel) -> Json:
    """Return a result as it is written."""
    kind = {"measurement": result.measurement} if isinstance(result, Scores) else {}
    return {**kind, **result.model_dump(mode="json", by_alias=True, exclude_unset=True)}
