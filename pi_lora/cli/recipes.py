"""`pi-lora new`, `plan`, `show` and `recipes`; `theory`; and `env`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveFloat, PositiveInt
from rich.table import Column, Table

from pi_lora import api
from pi_lora.cli.app import (
    OTHERS,
    RECIPES,
    BaseName,
    JsonFile,
    NewWindow,
    Override,
    Probe,
    RecipeFile,
    Target,
    TrustCode,
    app,
    read_length,
)
from pi_lora.model_ref import ModelRef
from pi_lora.terminal import out, working

GpuName = Annotated[str | None, Parameter(help="Name (4090, H100), memory size (48GB), or cpu.")]


@app.command(group=RECIPES)
def new(
    model: BaseName,
    /,
    *,
    target: NewWindow,
    gpu: GpuName = None,
    data: Annotated[list[str] | None, Parameter(help="Text to tune on: a file, folder, glob or hub id.")] = None,
    column: Annotated[str, Parameter(help="Column that holds the text or chats, if documents are rows.")] = "text",
    probe: Probe = None,
    output: Annotated[Path | None, Parameter(help="New recipe file; MODEL_TARGET.yaml by default.")] = None,
    trust_remote_code: TrustCode = False,
) -> None:
    """Write a recipe that extends MODEL to --target tokens and fits this machine's GPU, or --gpu."""
    api.new(
        ModelRef(model, trust_remote_code=trust_remote_code),
        target,
        gpu=gpu,
        data=data or (),
        column=column,
        probe=probe,
        output=output,
    )


@app.command(group=RECIPES)
def plan(
    recipe: RecipeFile,
    /,
    *overrides: Override,
    gpu: GpuName = None,
    trust_remote_code: TrustCode = False,
    json: JsonFile = None,
) -> None:
    """Estimate memory, tokens and hours of a training on --gpu, or on hardware.gpu of RECIPE."""
    api.plan(recipe, *overrides, gpu=gpu, trust_remote_code=trust_remote_code, json=json)


@app.command(group=RECIPES)
def show(recipe: RecipeFile, /, *overrides: Override) -> None:
    """Print the resolved recipe, and the origin of each value."""
    resolved = api.resolve_recipe(recipe, *overrides)
    table = Table("key", "value", Column("from", overflow="fold"), box=None)
    values = resolved.recipe.model_dump(mode="json")
    for key, origin in resolved.origins.items():
        section, _, name = key.partition(".")
        value = values[section]
        if name:
            value = value[name]
        table.add_row(key, str(value), origin)
    out.print(table)


@app.command(group=RECIPES)
def recipes(
    *,
    keys: Annotated[bool, Parameter(help="Print the reference of all recipe keys, docs/recipes.md.")] = False,
) -> None:
    """List the recipes that come with pi-lora."""
    if keys:
        print(api.recipe_keys(), end="")
        return
    table = Table("recipe", "what it makes", box=None)
    for name, summary in api.shipped_recipes().items():
        table.add_row(name, summary)
    out.print(table)


@app.command(group=OTHERS)
def theory(
    *,
    head_dim: Annotated[PositiveInt, Parameter(help="d, the rotary dimensions of a head.")] = 128,
    theta: Annotated[PositiveFloat, Parameter(help="c, the base of the frequencies.")] = 10_000.0,
    original: Annotated[int, Parameter(converter=read_length, help="L in tokens.")] = 2048,
    target: Annotated[Target, Parameter(help="L' in tokens; twice L by default.")] = None,
    output: Annotated[Path, Parameter(help="Folder for the figures.")] = Path("theory"),
    json: JsonFile = None,
) -> None:
    """Compute the bounds and draw the figures of the paper (section 2), by default for LLaMA-7B."""
    api.write_theory(
        output,
        head_dim=head_dim,
        theta=theta,
        original=original,
        target=target,
        json=json,
    )


@app.command(group=OTHERS)
def env() -> None:
    """Print versions, processor, memory, GPUs and kernels, for a bug report."""
    with working():
        entries = api.environment()
    width = max(map(len, entries))
    out.lines(*(f"{name:{width}}  {value}" for name, value in entries.items()))
