"""Every figure of every plan, to the last digit: `python tests/planning/test_plan_figures.py` writes them anew."""

import json
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, TUNINGS, small_plan

from pi_lora.planning.planning import Plan
from pi_lora.planning.text import planned
from pi_lora.recipe.files import recipe_paths

# Of the recipes, and of small models of the 14 families whose shapes were first written down by hand.
FIGURES = Path(__file__).with_suffix(".json")
RECIPES = Path(__file__).parents[2] / "recipes"


def figures(plan: Plan) -> list[Any]:
    found = plan.as_json()
    return [
        found["gpu"],
        found["parameters"],
        found["trained_parameters"],
        *found["bytes"].values(),
        found["peak_bytes_per_gpu"],
        found["host_bytes_per_gpu"],
        found["tokens"],
        *found["flops"].values(),
        found["hours"],
    ]


def all_plans() -> dict[str, Plan]:
    recipes = {str(path.relative_to(RECIPES)): planned(path) for path in recipe_paths(RECIPES)}
    small = {
        f"{kind}, {tuning} on {gpus}": small_plan(kind, tuning, gpus)
        for kind in FAMILIES
        for tuning in TUNINGS
        for gpus in (1, 4)
    }
    return recipes | small


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return all_plans()


EXPECTED = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}


@pytest.mark.parametrize("name", EXPECTED)
def test_figures_are_what_they_were(plans: dict[str, Plan], name: str) -> None:
    assert figures(plans[name]) == EXPECTED[name]


def test_figures_of_all_plans_are_known(plans: dict[str, Plan]) -> None:
    assert set(plans) == set(EXPECTED)


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(figures(plan))}" for name, plan in all_plans().items())
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
