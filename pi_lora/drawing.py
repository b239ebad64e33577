"""What all pictures share: colours, plain axes, and files that are written whole or refused; needs matplotlib."""

import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pi_lora.errors import DataError, PiLoraError

# Colours that the colour-blind tell apart (Okabe and Ito), each with a marker of its own for print.
BLUE, VERMILION, GREEN, ORANGE, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#999999"
STYLES = ((VERMILION, "o"), (GREY, "s"), (BLUE, "^"), (ORANGE, "D"), (GREEN, "v"), (PURPLE, "P"))
BOTH = ("png", "svg")


def check_can_draw(option: str) -> None:
    """Refuse to draw without matplotlib, before anything is measured.

    Raises:
        PiLoraError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PiLoraError(f"{option}: needs matplotlib, which is not installed; pip install 'pi-lora[plots]'")


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches, that no window will ever show."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@contextmanager
def themed(dark: bool) -> Iterator[None]:
    """Figures made meanwhile have letters for a light page, or for a dark one and no background of their own."""
    from matplotlib import rc_context

    ink = "#e6e6e6" if dark else "#1a1a1a"
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    paper = {"figure.facecolor": "none" if dark else "white", "axes.facecolor": "none", "savefig.facecolor": "auto"}
    settings: dict[Any, Any] = {**dict.fromkeys(inked, ink), **paper, "font.size": 11}
    with rc_context(settings):
        yield


def plain(axes: Any) -> None:
    """Axes with a faint grid and no frame on the sides that say nothing."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, folder: Path, name: str, formats: tuple[str, ...] = BOTH) -> list[Path]:
    """Write a figure as `folder/name.png` and `.svg`; the same figure gives the same bytes.

    Raises:
        DataError: the folder cannot be written.
    """
    files = [folder / f"{name}.{kind}" for kind in formats]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if file.suffix == ".svg":
                file.write_text(svg(figure), encoding="utf-8")
            else:
                figure.savefig(file, dpi=160)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}); choose another --output") from None
    return files


def save_png(figure: Any, file: Path) -> None:
    """Write a figure as a PNG, whatever the file is called; raise DataError if it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="png", dpi=160)
    except OSError as error:
        raise DataError(f"{file}: cannot be written ({error.strerror}); choose another file") from None


def svg(figure: Any) -> str:
    """A figure as SVG; the same one gives the same text."""
    from matplotlib import rc_context

    drawn = io.StringIO()
    with rc_context({"svg.hashsalt": "pi-lora"}):
        figure.savefig(drawn, format="svg", dpi=160, metadata={"Date": None})
    return drawn.getvalue()
