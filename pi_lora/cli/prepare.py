"""`pi-lora prepare`."""

import os
from typing import Annotated

from typer import Option

from pi_lora.cli.app import LIBRARIES, app, out, progress_bar, working
from pi_lora.cli.options import Overrides, RecipeFile, TrustRemoteCode
from pi_lora.types import Allowed


@app.command()
def prepare(
    recipe: RecipeFile,
    overrides: Overrides = None,
    processes: Annotated[int | None, Option(min=1, max=1024, help="That tokenize; one a core by default.")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Pack the training data of RECIPE into the cache, on a machine without GPUs; no weights are read."""
    with working(LIBRARIES):
        from pi_lora.preflight import check_data
        from pi_lora.recipe.files import load_recipe
        from pi_lora.recipe.places import cache_folder

        job = check_data(load_recipe(recipe, overrides or []).recipe, Allowed(trust_remote_code))
    with progress_bar("preparing data") as progress:
        data = job.prepare(progress, processes or os.cpu_count() or 1)
    done = f"{cache_folder()}: has the data of {recipe}; pi-lora train reads it from there"
    out.lines(*(f"data: {line}" for line in data.said), done)
