"""Which rows a model is measured on, and how they are asked about: as it was tuned, as the paper, or as a user says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pi_lora.errors import DataError
from pi_lora.recipe.files import load_recipe
from pi_lora.recipe.schema import Data
from pi_lora.run_folder import RECIPE_FILE

GOVREPORT = {
    "source": {"name": "tau/scrolls", "subset": "gov_report"},
    "document": "input",
    "summary": "output",
}
# Columns of a user's own rows unless they say: the words of the recipe's keys.
COLUMNS = {"document": "document", "summary": "summary"}
EVALUATION_SPLIT = "validation"


def task_of(model: str) -> dict[str, Any] | None:
    """The `data` section of the recipe that a run was tuned under, if it was on examples."""
    file = Path(model) / RECIPE_FILE
    data = load_recipe(file).recipe.data if file.is_file() else None
    return data.model_dump() if data is not None and data.has_examples else None


def evaluation_data(model: str, source: Mapping[str, Any], asked: Mapping[str, Any]) -> Data:
    """The rows to measure `model` on: those of `source` where it has a name, else those of the run's recipe, else
    GovReport's; of the validation split unless `source` says. `asked` are keys of a recipe's `data` that go first.

    Raises:
        DataError: keys that do not go together.
    """
    tuned_on = task_of(model)
    own = dict(tuned_on or ({**GOVREPORT} if "name" not in source else COLUMNS))
    if "template" in asked:
        own = {key: value for key, value in own.items() if key not in ("document", "summary", "completion")}
    if "document" in asked and "summary" in asked:
        own = {key: value for key, value in own.items() if key not in ("template", "completion")}
    first = own["source"][0] if tuned_on else own.get("source", {})
    rows = {"split": EVALUATION_SPLIT, **source} if "name" in source else {**first, "split": EVALUATION_SPLIT, **source}
    try:
        return Data.model_validate({**own, **asked, "source": rows})
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise DataError(f"--{key or 'data'}: {problem['msg'].removeprefix('Value error, ')}") from None
