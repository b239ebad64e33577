"""Tables of plans in docs/choosing.md and the README: those of the generator, and recipes plan what a row says."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import plan_of

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import family_plans  # noqa: E402
from pages import block  # noqa: E402
from pi_lora import api  # noqa: E402
from pi_lora.planning.gpus import GIB, find_gpu  # noqa: E402
from pi_lora.planning.training_plan import TrainingPlan  # noqa: E402
from pi_lora.recipe.files import load_recipe  # noqa: E402


def planned(file: Path) -> TrainingPlan:
    recipe = load_recipe(file).recipe
    return plan_of(recipe, find_gpu(recipe.hardware.gpu or ""))


def row(model: str, tokens: str, gpu: str) -> list[str]:
    """The cells of a row of the page."""
    beginning = f"| {model.partition('/')[2]} | {tokens} | {gpu} |"
    line = next(line for line in block(family_plans.PAGE, "families").splitlines() if line.startswith(beginning))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize(("page", "name", "write"), family_plans.BLOCKS, ids=("families", "serving", "readme"))
def test_the_page_has_the_table_of_the_generator(page: Path, name: str, write: Callable[[], str]) -> None:
    assert block(page, name) == write(), "run: python scripts/family_plans.py"


def test_the_task_of_the_page_is_planned_as_its_row_says(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(re.findall(r"```yaml\n(.*?)```", family_plans.PAGE.read_text(), re.DOTALL)[0])
    plan = planned(file)
    cells = row(plan.recipe.model.name, "32k", plan.gpu.name)
    assert cells[2:7] == ["keep", "qlora", "contiguous, 32k", "True", "4096"]
    assert cells[7:9] == [str(round(plan.memory.peak / GIB, 1)), str(round(plan.memory.host / GIB))]


@pytest.mark.parametrize("gpu", family_plans.GPUS)
def test_new_writes_the_recipe_of_a_row(gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = planned(api.new("Qwen/Qwen3-8B", 131072, gpu=gpu, output="my.yaml"))
    assert row("Qwen/Qwen3-8B", "128k", gpu)[2:] == [str(cell) for cell in family_plans.cells_of(plan).values()]
