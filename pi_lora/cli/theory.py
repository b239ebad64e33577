"""`pi-lora theory`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from pi_lora.cli.app import app, out, working
from pi_lora.cli.options import MOST_TOKENS, JsonFile, Trust, grouped
from pi_lora.errors import PiLoraError
from pi_lora.types import Json


@app.command()
@grouped
def theory(
    trust: Trust,
    model: Annotated[str | None, Option(help="Take d, c, L and L' from a hub id, folder, run or builtin:tiny.")] = None,
    text: Annotated[Path | None, Option(help="Also measure the model's queries and keys on this text.")] = None,
    head_dim: Annotated[int | None, Option(min=2, max=4096, help="d; 128 as in LLaMA-7B.")] = None,
    theta: Annotated[float | None, Option(min=1.001, max=1e12, help="c; 10000 as in LLaMA.")] = None,
    original: Annotated[int | None, Option(min=1, max=MOST_TOKENS, help="L in tokens; the model's, or 2048.")] = None,
    target: Annotated[int | None, Option(min=1, max=MOST_TOKENS, help="L' in tokens; the model's, or twice L.")] = None,
    output: Annotated[Path, Option(metavar="DIR", help="Folder for the figures.")] = Path("theory"),
    json: JsonFile = None,
) -> None:
    """Show why it works: the bounds and figures of the paper (section 2), for any setting and on a real model."""
    if text and not model:
        raise PiLoraError("--text: is what a model reads; name one with --model")
    if model and (head_dim is not None or theta is not None):
        raise PiLoraError("--head-dim, --theta: come with --model; leave them out")
    with working("computing the bounds"):
        from pi_lora.theory.bounds import Setting, bounds_of, setting_of
        from pi_lora.theory.figures import bounds_table, draw_theory

        if model:
            from pi_lora.models.model import find

            found = find(model, permissions=trust.permissions)
            setting = setting_of(found.config, original, target)
        else:
            window = original or Setting.original
            setting = Setting(head_dim or Setting.head_dim, theta or Setting.theta, window, target or 2 * window)
        bounds = bounds_of(setting)
    out.print(bounds_table(setting, bounds))
    result: Json = {"setting": asdict(setting), "bounds": asdict(bounds)}
    with working("drawing"):
        files = draw_theory(setting, output)
    if model and text:
        from pi_lora.theory.heads import measure_attention

        with working(f"loading {model}"):
            loaded = found.load()
        with working("measuring"):
            attention = measure_attention(loaded, text, setting)
        largest = attention.largest
        out.lines(
            f"{attention.model}, {attention.pairs} queries and keys a head from {attention.tokens} tokens of {text}:",
            f"inside the window |a| reaches {largest['inside']:.1f}; beyond it {largest['beyond']:.1f}, "
            f"{largest['beyond_share']:.0%} of its bound; of one pair, {largest['growth']:.1f} times as much as inside",
            f"in between, |a - a_linear| reaches {largest['between_share']:.0%} of its bound, and "
            f"{largest['papers_share']:.0%} of the paper's",
        )
        result["measured"] = asdict(attention)
    out.lines(*files)
    if json:
        from pi_lora.writing import write_json

        write_json(json, result)
