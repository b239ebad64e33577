"""Recipes, reports, uploads, the theory, and the environment."""

from pathlib import Path
from typing import TYPE_CHECKING

from pi_lora.api.inputs import (
    AnyModel,
    AnyRecipe,
    FilePath,
    Override,
    as_words,
    command,
    given_recipe,
    name_of,
    path_of,
)
from pi_lora.types import LIBRARIES, ui

if TYPE_CHECKING:
    from pi_lora.recipe.files import ResolvedRecipe

# Each function imports what it needs: a plan does without torch.


def resolve_recipe(recipe: AnyRecipe, *overrides: Override) -> "ResolvedRecipe":
    """Return a recipe with every value, and the origin of each value: `file:line`, the command line, or the default.

    Args:
        recipe: As for `train`.
        overrides: Keys to change, as for `train`.

    Raises:
        RecipeError: All mistakes of the recipe.
    """
    from pi_lora.recipe.files import load_recipe

    return load_recipe(given_recipe(recipe), as_words(overrides))


def shipped_recipes() -> dict[str, str]:
    """Return the recipes that come with pi-lora: names, and what each makes and needs."""
    from pi_lora.recipe import files

    folder = files.shipped_recipes()
    paths = files.recipe_paths(folder)
    return {str(path.relative_to(folder).with_suffix("")): files.recipe_summary(path) for path in paths}


def recipe_keys() -> str:
    """Return the page of every key that a recipe may have, in Markdown."""
    from pi_lora.recipe.reference import reference_page

    return reference_page()


@command
def write_theory(
    output: FilePath = "theory",
    *,
    head_dim: int = 128,
    theta: float = 10_000.0,
    original: int = 2048,
    target: int | None = None,
    json: FilePath | None = None,
) -> list[Path]:
    """Compute the bounds and draw the figures of the paper (section 2), by default for LLaMA-7B; return the figures.

    Args:
        output: The folder for the figures.
        head_dim: d, the numbers of a head that rotate.
        theta: c, the base of the frequencies.
        original: L in tokens.
        target: L' in tokens; twice L by default.
        json: A file to write the bounds to.

    Raises:
        ScalingError: `target` is not longer than `original`.
    """
    with ui.working("computing the bounds"):
        from dataclasses import asdict

        from pi_lora.storage import write_json
        from pi_lora.theory.bounds import Setting, bounds_of
        from pi_lora.theory.figures import bounds_table, draw_theory

        setting = Setting(head_dim, theta, original, target or 2 * original)
        bounds = bounds_of(setting)
    ui.show_table(bounds_table(setting, bounds))
    with ui.working("drawing"):
        files = list(draw_theory(setting, path_of(output)))
    for file in files:
        ui.show(str(file))
    if json:
        write_json(path_of(json), {"setting": asdict(setting), "bounds": asdict(bounds)})
    return files


def environment() -> dict[str, str]:
    """Return versions, processor, memory, GPUs and kernels, for a bug report."""
    from pi_lora.models.device import facts
    from pi_lora.storage import cache_folder

    return {**facts(), "cache": str(cache_folder())}


def write_report(run: AnyModel, *, html: bool = False) -> list[Path]:
    """Write the model card of a run into its folder, with pictures of its scores and its loss; return the files.

    Args:
        run: The folder of a run that was measured, a hub id, whose folder is in the cache, or what `train` returns.
        html: Also write one HTML page that needs no other file.

    Raises:
        ModelError: There is no such run, it was not measured, or pi-lora did not write the card that is there.
    """
    from pi_lora.models.resolve import run_folder
    from pi_lora.report import card

    return card.write_report(run_folder(name_of(run)), html=html)


@command
def push(run: AnyModel, repo: str, *, private: bool = False, progress: bool = False) -> str:
    """Upload a run or a merged model to the Hugging Face hub, with its card and without checkpoints. Return the
    address.

    Args:
        run: A folder, or what `train` returns.
        repo: The repository, as `you/name`; created if it does not exist.
        private: Create a private repository.
        progress: Whether to show a progress bar.

    Raises:
        ModelError: The folder is unfinished or lacks a file, or the hub refuses.
    """
    folder = path_of(name_of(run))
    with ui.working(LIBRARIES):
        from pi_lora.report.upload import push

    ui.say(f"uploading {folder} to {repo}")
    with ui.progress("uploading weights") as uploaded:
        return push(folder, repo, private=private, progress=uploaded)
