"""Recipes by name: a file of the current folder wins over the shipped recipe that is called so."""

from pathlib import Path

import pytest

from pi_lora.recipe.places import find_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("demo", RECIPES / "demo.yaml"),
        ("paper/7b_8k", RECIPES / "paper" / "7b_8k.yaml"),
        ("mine", Path("mine.yaml")),
        ("7b_8k", Path("7b_8k.yaml")),
        ("7b_16k", Path("7b_16k")),
    ],
)
def test_the_current_folder_comes_first(
    name: str, found: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A folder of a recipe's name, as `make demo` makes one, is no recipe.
    Path("demo").mkdir()
    for own in ("mine.yaml", "7b_8k.yaml", "7b_16k"):
        Path(own).touch()
    assert find_recipe(Path(name)) == found
