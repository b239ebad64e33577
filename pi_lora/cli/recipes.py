"""`pi-lora new`, `show`, `plan` and `recipes`: a recipe that fits, what one says, and what it takes."""

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveInt
from rich.table import Table

from pi_lora.cli.app import RECIPES, app, err, out, read_recipe, working
from pi_lora.cli.options import GpuName, JsonFile, ModelName, Override, Probe, RecipeFile, TrustRemoteCode, read_length
from pi_lora.errors import PiLoraError, RunExistsError
from pi_lora.recipe.places import shipped_recipes
from pi_lora.types import Permissions


@app.command(group=RECIPES, sort_key=1)
def new(
    model: ModelName,
    /,
    *,
    target: Annotated[PositiveInt | None, Parameter(converter=read_length, help="L', the window to extend to.")] = None,
    gpu: GpuName = None,
    data: Annotated[list[str] | None, Parameter(help="Text to tune on: a file, folder, glob or hub id.")] = None,
    probe: Probe = None,
    output: Annotated[Path | None, Parameter(help="The recipe file; MODEL_TARGET.yaml by default.")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a recipe that extends MODEL to --target tokens and fits this machine's GPU, or --gpu."""
    with working("reading the config"):
        from pi_lora.data.chats import AT_STAKE
        from pi_lora.data.documents import looks_local
        from pi_lora.models.tokenizer import has_chat_template
        from pi_lora.planning.choosing import choose, file_for, recipe_text, sections_of_texts, short_held_out
        from pi_lora.planning.gpus import device_here, find_gpu
        from pi_lora.planning.planning import find_shape
        from pi_lora.planning.text import plan_lines
        from pi_lora.scaling.config import window_of

        if probe:
            from pi_lora.report.probe import read_probe

        permissions = Permissions(trust_remote_code)
        window = window_of(find_shape(model, permissions=permissions)[0])
        device = find_gpu(gpu) if gpu else device_here()
    if target is None:
        raise PiLoraError(f"--target: missing; {model} reads {window} tokens, name more, as --target {4 * window}")
    file = output or file_for(model, target)
    if file.exists():
        raise RunExistsError(f"{file}: exists, and is not overwritten; remove it, or name another file with --output")
    for name in data or ():
        if not looks_local(name) and not name.startswith("builtin:"):
            err.lines(f"--data: {name}: no such file or folder; it is taken for a data set on the hub")
    probed = read_probe(probe).to_tune(target) if probe else None
    with working("reading the text"):
        sections = {**(sections_of_texts(data, target) if data else {}), **({"scaling": probed.best} if probed else {})}
        plan = choose(model, target, device, sections, permissions)
    with file.open("x", encoding="utf-8") as recipe:
        recipe.write(recipe_text(plan, file, probed.summary if probed else None))
    out.lines(*plan_lines(plan))
    if not data:
        names = " and ".join(source.name for source in plan.recipe.data.source)
        err.lines(f"--data: not given; the recipe reads {names}")
    elif short := short_held_out(plan):
        err.lines(short)
    if has_chat_template(model):
        err.lines(f"data: {AT_STAKE}")
    out.lines(f"{file}: written; read it, then: pi-lora train {shlex.quote(str(file))}")


@app.command(group=RECIPES, sort_key=3)
def show(recipe: RecipeFile, /, *overrides: Override) -> None:
    """Print the resolved recipe, and where each value came from."""
    resolved = read_recipe(recipe, overrides)
    table = Table("key", "value", "from", box=None)
    values = resolved.recipe.model_dump(mode="json")
    for key, origin in resolved.origins.items():
        section, _, name = key.partition(".")
        table.add_row(key, str(values[section][name] if name else values[section]), origin)
    out.print(table)


@app.command(group=RECIPES, sort_key=2)
def plan(
    recipe: RecipeFile,
    /,
    *overrides: Override,
    gpu: GpuName = None,
    trust_remote_code: TrustRemoteCode = False,
    json: JsonFile = None,
) -> None:
    """Estimate memory, tokens and hours of a training on --gpu, or on hardware.gpu of RECIPE."""
    from pi_lora.planning.gpus import device_for
    from pi_lora.planning.planning import plan_training
    from pi_lora.planning.text import component_lines, plan_lines
    from pi_lora.writing import write_json

    resolved = read_recipe(recipe, overrides).recipe
    training_plan = plan_training(resolved, device_for(resolved, gpu), Permissions(trust_remote_code))
    table = Table("on each device", "at most", box=None)
    for row in component_lines(training_plan):
        table.add_row(*row)
    out.lines(*plan_lines(training_plan))
    out.print(table)
    if json:
        write_json(json, training_plan.as_json())


@app.command(group=RECIPES, sort_key=4)
def recipes(
    folder: Annotated[
        Path | None, Parameter(name="FOLDER", help="A folder of recipes, instead of the shipped ones.")
    ] = None,
    /,
    *,
    markdown: Annotated[
        bool, Parameter(help="Print the page with the cost of every recipe, recipes/README.md.")
    ] = False,
    keys: Annotated[bool, Parameter(help="Print every key that a recipe may have, docs/recipes.md.")] = False,
) -> None:
    """List the shipped recipes, or those in a folder."""
    from pi_lora.recipe.files import recipe_paths, recipe_summary

    place = folder or shipped_recipes()
    if not place.is_dir():
        raise PiLoraError(f"{place}: no such folder; name one that holds recipes")
    if keys:
        from pi_lora.recipe.reference import reference_page

        print(reference_page(), end="")
    elif markdown:
        from pi_lora.planning.text import recipes_page

        print(recipes_page(place), end="")
    else:
        table = Table("recipe", "what it makes", box=None)
        for path in recipe_paths(place):
            name = path if folder else path.relative_to(place).with_suffix("")
            table.add_row(str(name), recipe_summary(path))
        out.print(table)
