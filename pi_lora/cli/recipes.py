"""`pi-lora show`, `plan` and `recipes`: what a recipe says, and what it takes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pi_lora.cli.app import JsonFile, Overrides, RecipeFile, TrustRemoteCode, app, out, printable, read_recipe
from pi_lora.errors import PiLoraError
from pi_lora.recipe.places import shipped_recipes
from pi_lora.types import Allowed


@app.command()
def show(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Print the resolved recipe, and where each value came from."""
    resolved = read_recipe(recipe, overrides)
    table = Table("key", "value", "from", box=None)
    values = resolved.recipe.model_dump(mode="json")
    for key, origin in resolved.origins.items():
        section, _, name = key.partition(".")
        table.add_row(key, str(values[section][name] if name else values[section]), origin)
    out.print(table)


@app.command()
def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="As 4090, A100-80 or H100; any by its memory, as 48GB; or cpu."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: JsonFile = None,
) -> None:
    """Print memory, tokens and hours of RECIPE before it is run, on --gpu or the device that its first line names."""
    from pi_lora.evaluation.results import write_json
    from pi_lora.planning.planning import find_gpu
    from pi_lora.planning.text import component_lines, plan_lines, planned

    read_recipe(recipe, overrides)  # for what it warns of
    found = planned(recipe, overrides or [], find_gpu(gpu) if gpu else None, Allowed(trust_remote_code))
    table = Table("on each device", "at most", box=None)
    for row in component_lines(found):
        table.add_row(*row)
    out.print("\n".join(plan_lines(found)), soft_wrap=True)
    out.print(table)
    if json:
        write_json(found.as_json(), json)


@app.command()
def recipes(
    folder: Annotated[
        Path | None, typer.Argument(help="Where to look; by default those that come with pi-lora.", show_default=False)
    ] = None,
    markdown: Annotated[bool, typer.Option(help="Print the page with what each takes, recipes/README.md.")] = False,
    keys: Annotated[bool, typer.Option(help="Print every key that a recipe may have, docs/recipes.md.")] = False,
) -> None:
    """List the recipes that come with pi-lora by name, or those in a folder."""
    from pi_lora.recipe.files import recipe_paths, recipe_summary

    place = folder or shipped_recipes()
    if not place.is_dir():
        raise PiLoraError(f"{place}: no such folder; name one that holds recipes")
    if keys:
        from pi_lora.recipe.reference import reference_page

        print(reference_page(), end="")
    elif markdown:
        from pi_lora.planning.text import recipes_page

        print(printable(recipes_page(place)), end="")
    else:
        table = Table("recipe", "what it makes", box=None)
        for path in recipe_paths(place):
            name = path if folder else path.relative_to(place).with_suffix("")
            table.add_row(str(name), recipe_summary(path))
        out.print(table)
