"""What all pictures share: colours, plain axes, and files that are written whole or refused; needs matplotlib."""

import importlib.util
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


def plain(axes: Any) -> None:
    """Axes with a faint grid and no frame on the sides that say nothing."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, folder: Path, name: str, formats: tuple[str, ...] = BOTH) -> list[Path]:
    """Write a figure as `folder/name.png` and `.svg`; the same figure gives the same bytes.

    Raises:
        DataError: the folder cannot be written.
    """
    from matplotlib import rc_context

    files = [folder / f"{name}.{kind}" for kind in formats]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": "pi-lora"}):
            for file in files:
                dated = {"Date": None} if file.suffix == ".svg" else {}
                figure.savefig(file, dpi=160, metadata=dated)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}); choose another --output") from None
    return files
