"""Perplexity as a table, of one model or several side by side, and the loss by position as a table and a picture."""

from collections.abc import Sequence
from itertools import chain, cycle
from pathlib import Path

from rich.table import Table

from pi_lora.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, new_figure, plain, save
from pi_lora.evaluation.results import LossByPosition, PerplexityScores

COLOURS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, GREY)


def perplexity_table(*models: PerplexityScores) -> Table:
    """Return perplexity by window, a column for each model; with bits per byte for one model, or where tokenizers
    differ.
    """
    first, alone = models[0], len(models) == 1
    about = f"perplexity, {first.documents} documents of {first.data}"
    table = Table(title=f"{first.model}: {about}" if alone else about)
    table.add_column("window", justify="right")
    # Cut to as many tokens, a text has as many in every tokenizer, but not of the same bytes.
    alike = len({tuple((row.tokens, row.bytes) for row in scores.windows) for scores in models}) == 1
    known = all(row.bits_per_byte for scores in models for row in scores.windows)
    in_bits = known and (alone or not alike)
    for scores in models:
        table.add_column("perplexity" if alone else scores.model, justify="right", overflow="fold")
        if in_bits:
            table.add_column("bits per byte", justify="right")
    if alike:
        table.add_column("tokens", justify="right")
    for rows in zip(*(scores.windows for scores in models), strict=True):
        tokens = [f"{rows[0].tokens:,}"] if alike else []
        cells = ((f"{row.perplexity:.3f}", *([f"{row.bits_per_byte:.4f}"] if in_bits else [])) for row in rows)
        table.add_row(str(rows[0].window), *chain.from_iterable(cells), *tokens)
    scales = ", ".join(f"{scores.scale:g}" for scores in models)
    dtypes = ", ".join(dict.fromkeys(str(scores.dtype) for scores in models))
    table.caption = f"scale {scales}, stride {first.stride}, {dtypes}, every token weighted equally"
    if not alike:
        table.caption += "; the tokenizers differ: perplexities by token do not compare"
        table.caption += ", bits per byte do" * in_bits
    return table


def position_table(*models: PerplexityScores) -> Table:
    """Return the mean loss by the number of tokens before a token in the longest window, a column for each model."""
    curves = _curves(models)
    table = Table(title=f"loss by position in windows of {curves[0].window} tokens")
    table.add_column("tokens before", justify="right")
    for scores in models:
        table.add_column("nats a token" if len(models) == 1 else scores.model, justify="right", overflow="fold")
    for bins in zip(*(curve.bins for curve in curves), strict=True):
        table.add_row(f"{bins[0].first}-{bins[0].last - 1}", *(f"{each.loss:.3f}" for each in bins))
    table.caption = "of all tokens in windows that do not overlap"
    return table


def position_picture(models: Sequence[PerplexityScores], file: Path) -> None:
    """Draw the mean loss by position in the longest window as a PNG, a curve for each model."""
    curves = _curves(models)
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    for scores, curve, colour in zip(models, curves, cycle(COLOURS), strict=False):
        bounds = [curve.bins[0].first, *(each.last for each in curve.bins)]
        axes.stairs([each.loss for each in curve.bins], bounds, baseline=None, color=colour, label=scores.model)
        if scores.window:
            axes.axvline(scores.window / scores.scale, color=colour, linestyle=":", linewidth=1)
    axes.set(
        xlabel="tokens before, in the window (dotted: the window before stretching)",
        ylabel="loss (nats a token)",
        xlim=(0, curves[-1].bins[-1].last),
    )
    plain(axes, f"Loss by position in windows of {curves[0].window} tokens", frameon=False, fontsize=9)
    save(figure, file)


def _curves(models: Sequence[PerplexityScores]) -> list[LossByPosition]:
    return [scores.by_position for scores in models if scores.by_position]
