"""Every file under recipes/ resolves, and every field of the schema is read by something."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import pi_lora
from conftest import plan_of
from pi_lora.evaluation.suite import MEASUREMENTS
from pi_lora.models.resolve import SHIPPED_CONFIGS, shipped_folder
from pi_lora.planning.gpus import CPU, find_gpu
from pi_lora.planning.training_plan import TrainingPlan
from pi_lora.recipe.files import load_recipe, recipe_paths, recipe_summary
from pi_lora.recipe.reference import reference_page
from pi_lora.recipe.schema import Recipe

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
sys.path.insert(0, str(ROOT / "scripts"))
import family_plans  # noqa: E402


def planned(path: Path, overrides: tuple[str, ...] = ()) -> TrainingPlan:
    recipe = load_recipe(path, overrides).recipe
    return plan_of(recipe, find_gpu(recipe.hardware.gpu or CPU))


def test_every_recipe_on_disk_is_found() -> None:
    on_disk = {path for path in RECIPES.rglob("*") if path.is_file() and path.suffix != ".md"}
    assert set(recipe_paths(RECIPES)) == {path for path in on_disk if not path.name.startswith("_")}


@pytest.mark.parametrize("path", recipe_paths(RECIPES), ids=str)
def test_a_recipe_fits_on_the_hardware_that_it_names_and_states_its_models_own_window(path: Path) -> None:
    plan, summary = planned(path), recipe_summary(path)
    hardware = plan.recipe.hardware
    assert plan.fits
    if hardware.gpus is None:
        assert "two CPU cores" in summary
    else:
        gpus = "one" if hardware.processes == 1 else str(hardware.processes)
        assert hardware.gpu == plan.gpu.name
        assert f"on {gpus} {plan.gpu.name}" in summary
        assert "Not run here" in summary
    assert plan.recipe.context.original in (None, plan.model.original)
    assert planned(path, ("context.original=null",)).model.original == plan.model.original


def test_shapes_are_shipped_for_the_models_of_the_recipes_and_of_families_and_no_others() -> None:
    names = {load_recipe(path).recipe.model.name for path in recipe_paths(RECIPES)}
    names.update({*family_plans.MODELS, *family_plans.FIRST})
    assert {shipped_folder(name) for name in names if not name.startswith("builtin:")} == set(SHIPPED_CONFIGS.iterdir())


# Section 3.1 of the paper and its tables: model, target in thousands, scaling, steps, rate, batch, GPUs.
PAPER = {
    "7b_8k": ("llama-7b", 8, "pi", 1000, 2e-5, 64, 32),
    "7b_16k": ("llama-7b", 16, "pi", 1000, 2e-5, 128, 128),
    "7b_32k": ("llama-7b", 32, "pi", 1000, 2e-5, 128, 128),
    "7b_8k_direct": ("llama-7b", 8, "direct", 10000, 2e-5, 64, 32),
    "7b_8k_redpajama": ("llama-7b", 8, "pi", 1000, 2e-5, 64, 32),
    "13b_8k": ("llama-13b", 8, "pi", 1000, 2e-5, 64, 32),
    "13b_16k": ("llama-13b", 16, "pi", 1000, 2e-5, 128, 128),
    "13b_32k": ("llama-13b", 32, "pi", 1000, 2e-5, 128, 128),
    "13b_8k_direct": ("llama-13b", 8, "direct", 10000, 2e-5, 64, 32),
    "33b_8k": ("llama-30b", 8, "pi", 1000, 1e-5, 64, 32),
    "33b_16k": ("llama-30b", 16, "pi", 1000, 1e-5, 128, 128),
    "33b_8k_direct": ("llama-30b", 8, "direct", 10000, 1e-5, 64, 32),
    "65b_8k": ("llama-65b", 8, "pi", 1000, 1e-5, 128, 128),
    # Section 3.5: ten times round 17,457 examples.
    "govreport_7b_16k": ("7b_16k", 16, "keep", 1370, 2e-5, 128, 128),
}


def test_recipes_of_the_paper_have_its_settings() -> None:
    found = {}
    for path in recipe_paths(RECIPES / "paper"):
        recipe = load_recipe(path).recipe
        training, hardware = recipe.training, recipe.hardware
        assert recipe.tuning.method == "full"
        assert recipe.paper
        assert recipe.paper.startswith("table ")
        found[path.stem] = (
            recipe.model.name.rpartition("/")[2],
            recipe.context.target // 1024,
            recipe.scaling,
            training.steps,
            training.learning_rate,
            training.global_batch_size,
            hardware.processes,
        )
    assert found == PAPER


def test_recipes_of_models_of_today_follow_the_recommendation_and_none_combines_pi_with_pose() -> None:
    """docs/choosing.md: LoRA alone under YaRN on PoSE sequences with a quarter of recall documents."""
    today = [path for path in recipe_paths(RECIPES) if re.match("llama3|mistral|qwen3|smollm2", path.stem)]
    assert len(today) >= 8
    for path in today:
        recipe = load_recipe(path).recipe
        assert (recipe.scaling, recipe.data.positions, recipe.tuning.rank) == ("yarn", "pose", 16), path
        assert (recipe.tuning.target_modules, recipe.tuning.modules_to_save) == ("all-linear", "nothing")
        weights = {source.name: source.weight for source in recipe.data.source}
        assert weights["builtin:recall"] / sum(weights.values()) == pytest.approx(0.25)
    for path in recipe_paths(RECIPES):
        recipe = load_recipe(path).recipe
        assert (recipe.scaling, recipe.data.positions) != ("pi", "pose"), path


def fields(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        annotation: Any = field.annotation
        for inner in (annotation, *getattr(annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from fields(inner)


# Other properties of the schema give these to the rest.
READ_BY_THE_SCHEMA = {"alpha", "modules_to_save", "cpu_processes", "sequence_tokens", "while_training"}


def test_every_field_is_read_outside_the_schema() -> None:
    root = Path(pi_lora.__file__).parent
    # Sections of `evaluation` are read by name; `packing` has one value.
    read = {*MEASUREMENTS, "packing", *READ_BY_THE_SCHEMA}
    for path in {*root.rglob("*.py")} - {*(root / "recipe").glob("*.py")}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
    assert set(fields(Recipe)) - read == set()


def test_the_page_of_keys_is_current() -> None:
    page = (RECIPES.parent / "docs" / "recipes.md").read_text()
    assert page == reference_page(), "run: make recipes"
    assert all(f"{name}` |" in page for name in fields(Recipe) if name not in Recipe.model_fields)
