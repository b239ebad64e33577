"""Perplexity as a table, of one model or several side by side, and the loss by position as a picture."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from rich.table import Table

from pi_lora.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION
from pi_lora.types import Json

COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, GREY)


def perplexity_table(*models: Json) -> Table:
    """Perplexity by window, a column for each model, measured alike."""
    first = models[0]
    alone = len(models) == 1
    about = f"perplexity, {first['documents']} documents of {first['data']}"
    table = Table(title=f"{first['model']}: {about}" if alone else about)
    table.add_column("window", justify="right")
    for scores in models:
        table.add_column("perplexity" if alone else scores["model"], justify="right", overflow="fold")
    alike = all(_tokens(scores) == _tokens(first) for scores in models)
    if alike:
        table.add_column("tokens", justify="right")
    for index, row in enumerate(first["windows"]):
        found = [f"{scores['windows'][index]['perplexity']:.3f}" for scores in models]
        table.add_row(str(row["window"]), *found, *([f"{row['tokens']:,}"] if alike else []))
    scales = ", ".join(f"{scores['scale']:g}" for scores in models)
    dtypes = ", ".join(dict.fromkeys(scores["dtype"] for scores in models))
    table.caption = f"scale {scales}, stride {first['stride']}, {dtypes}, every token weighted equally"
    if not alike:
        table.caption += "; the tokenizers differ: perplexities by token do not compare"
    return table


def position_table(*models: Json) -> Table:
    """The mean loss of tokens by how many stand before them in the longest window, a column for each model."""
    first = models[0]["by_position"]
    table = Table(title=f"loss by position in windows of {first['window']} tokens")
    table.add_column("tokens before", justify="right")
    for scores in models:
        table.add_column("nats a token" if len(models) == 1 else scores["model"], justify="right", overflow="fold")
    for rows in zip(*(scores["by_position"]["bins"] for scores in models), strict=True):
        bounds = f"{rows[0]['from']}-{rows[0]['to'] - 1}"
        table.add_row(bounds, *(f"{row['loss']:.3f}" for row in rows))
    table.caption = "of all tokens in windows that do not overlap"
    return table


def position_picture(models: Sequence[Json], file: Path) -> None:
    """The mean loss against the position in the longest window, a curve for each model; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for scores, colour in zip(models, cycle(COLOURS), strict=False):
        bins = scores["by_position"]["bins"]
        bounds = [bins[0]["from"], *(each["to"] for each in bins)]
        axes.stairs([each["loss"] for each in bins], bounds, baseline=None, color=colour, label=scores["model"])
        axes.axvline(scores["window"] / scores["scale"], color=colour, linestyle=":", linewidth=1)
    axes.set(
        xlabel="tokens before, in the window (dotted: the window before stretching)",
        ylabel="loss (nats a token)",
        xlim=(0, bounds[-1]),
    )
    axes.set_title(f"Loss by position in windows of {models[0]['by_position']['window']} tokens", fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=160)
    pyplot.close(figure)


def _tokens(scores: Json) -> list[int]:
    return [row["tokens"] for row in scores["windows"]]
