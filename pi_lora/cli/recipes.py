"""`pi-lora new`, `plan`, `show` and `recipes`; `theory`; and `env`."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveFloat, PositiveInt
from rich.table import Column, Table

from pi_lora.cli.app import (
    OTHERS,
    RECIPES,
    JsonFile,
    ModelName,
    NewWindow,
    Override,
    Permitted,
    Probe,
    RecipeFile,
    Target,
    app,
    read_length,
)
from pi_lora.storage import cache_folder, write_json
from pi_lora.terminal import err, out, working
from pi_lora.types import NO_PERMISSIONS

GpuName = Annotated[str | None, Parameter(help="A name (4090, H100), a memory size (48GB), or cpu.")]


@app.command(group=RECIPES)
def new(
    model: ModelName,
    /,
    *,
    target: NewWindow,
    gpu: GpuName = None,
    data: Annotated[list[str] | None, Parameter(help="Text to tune on: a file, folder, glob or hub id.")] = None,
    column: Annotated[str, Parameter(help="Of rows: the one that holds the text, or chats.")] = "text",
    probe: Probe = None,
    output: Annotated[Path | None, Parameter(help="The recipe file; MODEL_TARGET.yaml by default.")] = None,
    permissions: Permitted = NO_PERMISSIONS,
) -> None:
    """Write a recipe that extends MODEL to --target tokens and fits this machine's GPU, or --gpu."""
    with working("reading model and text"):
        from pi_lora.planning.choosing import new_recipe
        from pi_lora.planning.planning import plan_lines

        probed = None
        if probe:
            from pi_lora.report.probe import read_probe

            probed = read_probe(probe).at(target).to_tune()
        file, plan, notes = new_recipe(model, target, gpu, data or (), probed, output, permissions, column)
    out.lines(*plan_lines(plan))
    err.lines(*notes)
    out.lines(f"{file}: written; read it, then: pi-lora train {shlex.quote(str(file))}")


@app.command(group=RECIPES)
def plan(
    recipe: RecipeFile,
    /,
    *overrides: Override,
    gpu: GpuName = None,
    permissions: Permitted = NO_PERMISSIONS,
    json: JsonFile = None,
) -> None:
    """Estimate memory, tokens and hours of a training on --gpu, or on hardware.gpu of RECIPE."""
    from pi_lora.api import plan
    from pi_lora.planning.planning import plan_lines

    training_plan = plan(recipe, *overrides, gpu=gpu, permissions=permissions)
    out.lines(*plan_lines(training_plan))
    if json:
        write_json(json, training_plan.as_json())


@app.command(group=RECIPES)
def show(recipe: RecipeFile, /, *overrides: Override) -> None:
    """Print the resolved recipe, and where each value came from."""
    from pi_lora.recipe.files import load_recipe

    resolved = load_recipe(recipe, overrides)
    table = Table("key", "value", Column("from", overflow="fold"), box=None)
    values = resolved.recipe.model_dump(mode="json")
    for key, origin in resolved.origins.items():
        section, _, name = key.partition(".")
        table.add_row(key, str(values[section][name] if name else values[section]), origin)
    out.print(table)


@app.command(group=RECIPES)
def recipes(
    *,
    keys: Annotated[bool, Parameter(help="Print every key that a recipe may have, docs/recipes.md.")] = False,
) -> None:
    """List the recipes that come with pi-lora."""
    from pi_lora.recipe.files import recipe_paths, recipe_summary, shipped_recipes

    folder = shipped_recipes()
    if keys:
        from pi_lora.recipe.reference import reference_page

        print(reference_page(), end="")
    else:
        table = Table("recipe", "what it makes", box=None)
        for path in recipe_paths(folder):
            table.add_row(str(path.relative_to(folder).with_suffix("")), recipe_summary(path))
        out.print(table)


@app.command(group=OTHERS)
def theory(
    *,
    head_dim: Annotated[PositiveInt, Parameter(help="d, the numbers of a head that rotate.")] = 128,
    theta: Annotated[PositiveFloat, Parameter(help="c, the base of the frequencies.")] = 10_000.0,
    original: Annotated[int, Parameter(converter=read_length, help="L in tokens.")] = 2048,
    target: Annotated[Target, Parameter(help="L' in tokens; twice L by default.")] = None,
    output: Annotated[Path, Parameter(help="Folder for the figures.")] = Path("theory"),
    json: JsonFile = None,
) -> None:
    """Compute the bounds and draw the figures of the paper (section 2), by default for LLaMA-7B."""
    with working("computing the bounds"):
        from pi_lora.theory.bounds import Setting, bounds_of
        from pi_lora.theory.figures import bounds_table, draw_theory

        setting = Setting(head_dim, theta, original, target or 2 * original)
        bounds = bounds_of(setting)
    out.print(bounds_table(setting, bounds))
    with working("drawing"):
        files = draw_theory(setting, output)
    out.lines(*files)
    if json:
        write_json(json, {"setting": asdict(setting), "bounds": asdict(bounds)})


@app.command(group=OTHERS)
def env() -> None:
    """Print versions, processor, memory, GPUs and kernels, for a bug report."""
    with working():
        from pi_lora.models.machine import facts

        entries = {**facts(), "cache": str(cache_folder())}
    width = max(map(len, entries))
    out.lines(*(f"{name:{width}}  {value}" for name, value in entries.items()))
