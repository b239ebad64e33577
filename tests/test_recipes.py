"""Every file under recipes/ resolves, and every field of the schema is read by something."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import pi_lora
from pi_lora.recipe.files import load_recipe, recipe_paths, recipe_summary
from pi_lora.recipe.schema import Recipe

RECIPES = Path(__file__).parent.parent / "recipes"


def test_no_recipe_is_missed() -> None:
    on_disk = [path for path in RECIPES.rglob("*") if path.is_file() and path.suffix != ".md"]
    assert set(recipe_paths(RECIPES)) == {path for path in on_disk if not path.name.startswith("_")}
    assert all(path.suffix == ".yaml" for path in on_disk)


@pytest.mark.parametrize("path", recipe_paths(RECIPES), ids=str)
def test_recipe_resolves_and_says_what_it_makes(path: Path) -> None:
    recipe = load_recipe(path).recipe
    assert recipe.context.target > 0
    assert len(recipe_summary(path)) > 20


def fields(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        annotation: Any = field.annotation
        for inner in (annotation, *getattr(annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from fields(inner)


def test_every_field_is_read_outside_the_schema() -> None:
    root = Path(pi_lora.__file__).parent
    read = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
    assert set(fields(Recipe)) - read == set()
