"""Where recipes are found by name, and where files go that no recipe names."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$PI_LORA_CACHE`, or `pi-lora` in the user's cache folder; it may be deleted whenever nothing runs."""
    if own := os.environ.get("PI_LORA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pi-lora"


def shipped_recipes() -> Path:
    """Return the folder of the recipes that come with the package: in it when installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def find_recipe(name: Path) -> Path:
    """Return the recipe file that a user means: `name`, or `name` with `.yaml`, in the current folder; else the shipped
    recipe that is called so; else `name` itself, which does not exist.

    >>> find_recipe(Path("paper/7b_8k")).relative_to(shipped_recipes()).as_posix()
    'paper/7b_8k.yaml'
    """
    candidates = (folder / file for folder in (Path(), shipped_recipes()) for file in (name, Path(f"{name}.yaml")))
    return next((file for file in candidates if file.is_file()), name)
