"""`pi-lora theory`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from pi_lora.cli.app import OTHERS, app, out, working
from pi_lora.cli.options import GROUP, JsonFile, Original, Target, Trust
from pi_lora.errors import PiLoraError
from pi_lora.writing import write_json


@app.command(group=OTHERS, sort_key=1)
def theory(
    *,
    model: Annotated[str | None, Parameter(help="Read d, c, L, L' from a hub id, folder, run or builtin:tiny.")] = None,
    head_dim: Annotated[int | None, Parameter(help="d; 128 as in LLaMA-7B.", validator=Number(gte=2, modulo=2))] = None,
    theta: Annotated[float | None, Parameter(help="c; 10000 as in LLaMA.", validator=Number(gt=1))] = None,
    original: Annotated[Original, Parameter(help="L in tokens; the model's, or 2048.")] = None,
    target: Annotated[Target, Parameter(help="L' in tokens; the model's, or twice L.")] = None,
    output: Annotated[Path, Parameter(help="Folder for the figures.")] = Path("theory"),
    json: JsonFile = None,
    trust: Annotated[Trust, GROUP] = Trust(),
) -> None:
    """Compute the bounds and draw the figures of the paper (section 2), for any setting or a model."""
    if model and (head_dim is not None or theta is not None):
        raise PiLoraError("--head-dim, --theta: come with --model; leave them out")
    with working("computing the bounds"):
        from pi_lora.theory.bounds import Setting, bounds_of, setting_of
        from pi_lora.theory.figures import bounds_table, draw_theory

        if model:
            from pi_lora.models.model import find

            setting = setting_of(find(model, permissions=trust.permissions).config, original, target)
        else:
            window = original or Setting.original
            setting = Setting(head_dim or Setting.head_dim, theta or Setting.theta, window, target or 2 * window)
        bounds = bounds_of(setting)
    out.print(bounds_table(setting, bounds))
    with working("drawing"):
        files = draw_theory(setting, output)
    out.lines(*files)
    if json:
        write_json(json, {"setting": asdict(setting), "bounds": asdict(bounds)})
