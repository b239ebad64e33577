"""Pictures of runs and models: perplexity against window, passkeys against distance, loss against step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from pi_lora.drawing import STYLES, new_figure, plain, round_levels, save, save_png, themed
from pi_lora.evaluation.results import PasskeyScores, PerplexityScores

PICTURES = "pictures"
# What each picture shows, for those who do not see it.
CAPTIONS = {
    "perplexity": "Perplexity against window",
    "passkey": "Passkeys retrieved against their distance",
    "loss": "Training loss against step",
}
# Inches; narrow enough that the letters can be read on a phone.
WIDTH, HEIGHT = 5.0, 3.7

# The name of a picture to a function that draws it, in the colours of the moment.
Drawings = dict[str, Callable[[], Any]]
TrainingLog = Sequence[Mapping[str, Any]]


def drawings_of(
    perplexity: Mapping[str, PerplexityScores],
    passkey: Mapping[str, PasskeyScores],
    losses: Mapping[str, TrainingLog],
    original: int | None,
) -> Drawings:
    """Return what draws `perplexity`, `passkey` and `loss`, as far as there are results.

    The mappings are from the label of a curve to what it shows; `original` is the window before it was extended, in
    tokens.
    """
    panels: dict[str, tuple[Callable[[Any], None], Mapping[str, object]]] = {
        "perplexity": (partial(_perplexity, perplexity, original), perplexity),
        "passkey": (partial(_passkey, passkey, original), passkey),
        "loss": (partial(_loss, losses), losses),
    }
    return {name: partial(_figure, panel) for name, (panel, curves) in panels.items() if any(curves.values())}


def write_pictures(drawings: Drawings, folder: Path) -> list[Path]:
    """Draw each as a PNG; raise DataError if the folder cannot be written."""
    with themed(dark=False):
        return [file for name, draw in drawings.items() for file in save(draw(), folder, name, ("png",))]


def comparison_picture(
    perplexity: Mapping[str, PerplexityScores], passkey: Mapping[str, PasskeyScores], original: int, file: Path
) -> None:
    """Draw perplexity and passkeys of several models side by side; raise DataError if the file cannot be written."""
    with themed(dark=False):
        save_png(_figure(partial(_perplexity, perplexity, original), partial(_passkey, passkey, original)), file)


def picture_lines(folder: Path) -> Iterator[str]:
    """Yield a line of Markdown for each picture in a folder."""
    for name, caption in CAPTIONS.items():
        if (folder / PICTURES / f"{name}.png").is_file():
            yield f"![{caption}]({PICTURES}/{name}.png)"


def _figure(*panels: Callable[[Any], None]) -> Any:
    """A figure of panels side by side, each with its legend above it, where it hides no curve."""
    figure = new_figure(WIDTH * len(panels), HEIGHT)
    for part, panel in zip(figure.subfigures(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes = part.subplots()
        panel(axes)
        plain(axes)
        if axes.get_legend_handles_labels()[0]:
            part.legend(frameon=False, loc="outside upper left", ncols=2, fontsize=10 if len(panels) == 1 else 8)
    return figure


def _perplexity(models: Mapping[str, PerplexityScores], original: int | None, axes: Any) -> None:
    _curves(axes, {name: [(row.window, row.perplexity) for row in each.windows] for name, each in models.items()})
    axes.set(xscale="log", yscale="log", xlabel="window (tokens)", ylabel="perplexity (lower is better)")
    ticks = sorted({row.window for scores in models.values() for row in scores.windows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    levels = round_levels(*axes.get_ylim())
    axes.set_yticks(levels, [f"{level:g}" for level in levels])
    axes.minorticks_off()
    _mark_original(axes, original)


def _passkey(models: Mapping[str, PasskeyScores], original: int | None, axes: Any) -> None:
    labels = {name: f"{name}: k_max {each.k_max:,}" for name, each in models.items()}
    _curves(
        axes, {labels[name]: [(row.k, 100 * row.success_rate) for row in each.depths] for name, each in models.items()}
    )
    axes.set(xlabel="distance of the passkey (tokens)", ylabel="retrieved (%)", ylim=(-4, 104))
    _mark_original(axes, original)


def _loss(runs: Mapping[str, TrainingLog], axes: Any) -> None:
    _curves(
        axes, {name: [(line["step"], line["loss"]) for line in lines] for name, lines in runs.items()}, marked=False
    )
    axes.set(xlabel="step", ylabel="training loss (nats per token)")


def _curves(axes: Any, curves: Mapping[str, Sequence[tuple[float, float]]], marked: bool = True) -> None:
    for (label, points), (colour, marker) in zip(curves.items(), cycle(STYLES), strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker if marked else "", markersize=5, label=label)


def _mark_original(axes: Any, original: int | None) -> None:
    if original:
        axes.axvline(original, color="0.55", linestyle=":", linewidth=1.2, label="original window")
