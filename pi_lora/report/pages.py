"""What `pi-lora report` writes: the card of a run or the comparison of several, pictures, and one HTML page."""

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template
from markdown_it import MarkdownIt

from pi_lora.drawing import svg, themed
from pi_lora.errors import DataError, ModelError
from pi_lora.evaluation.results import PerplexityScores
from pi_lora.report.card import CARD, SCORES_BEGIN, refresh_scores, write_card
from pi_lora.report.pictures import PICTURES, Drawings, drawings_of, picture_lines, write_pictures
from pi_lora.report.run import Run
from pi_lora.report.summary import side_by_side

COMPARISON = Path("report")
HIDDEN = re.compile(r"\A---\n.*?\n---\n|<!--.*?-->", re.DOTALL)  # metadata and comments of a card
IMAGE = re.compile(rf'<img src="{PICTURES}/(\w+)\.png" alt="([^"]*)" />')


def write_report(runs: Sequence[Run], output: Path | None = None, html: bool = False) -> list[Path]:
    """Write the card of one run, or the comparison of several, with pictures, and as an HTML page if asked.

    The card of one run goes into its folder, a comparison into `report/`, unless `output` names another folder. Raises
    DataError if it cannot be written, ModelError if two runs have one name or the card there is not pi-lora's.
    """
    names = [run.name for run in runs]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ModelError(f"{', '.join(doubled)}: is the name of several of these runs; rename a folder")
    folder = output or (runs[0].path if len(runs) == 1 else COMPARISON)
    card, page, own = folder / CARD, folder / "report.html", folder == runs[0].path
    if own and card.is_file() and SCORES_BEGIN not in card.read_text(encoding="utf-8"):
        raise ModelError(f"{card}: has no section for scores, so pi-lora did not write it; move it away")
    drawings = drawings_of(runs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [*write_pictures(drawings, folder / PICTURES), card]
        if len(runs) > 1:
            card.write_text(comparison_page(runs, folder), encoding="utf-8")
        elif own and card.is_file():
            refresh_scores(runs[0])
        else:
            write_card(folder, runs[0])
        if html:
            page.write_text(html_page(card.read_text(encoding="utf-8"), drawings), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}); choose another --output") from None
    return [*files, page] if html else files


def comparison_page(runs: Sequence[Run], folder: Path) -> str:
    """Return the comparison in Markdown, with the pictures in `folder`, and a table for each measurement."""
    swept = [scores for run in runs if (scores := run.tuned("perplexity", PerplexityScores))]
    tuned = {
        name: {run.name: run.results[name][1] for run in runs if name in run.results}
        for name in sorted({name for run in runs for name in run.results})
    }
    return _rendered(
        "comparison.md",
        runs=runs,
        tables=[side_by_side(name, scores).rstrip("\n") for name, scores in tuned.items() if any(scores.values())],
        pictures=list(picture_lines(folder)),
        sweeps=sorted({(scores.data, scores.stride) for scores in swept}),
    )


def html_page(card: str, drawings: Drawings) -> str:
    """Return a card in Markdown as an HTML page that needs no other file: pictures are inside, light and dark.

    The metadata is left out. HTML in the card is shown as text: names of models and data come from elsewhere.
    """
    text = HIDDEN.sub("", card)
    title = next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), "pi-lora")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    body = IMAGE.sub(lambda image: _picture(drawings, image[1], image[2]), body)
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return _rendered("page.html", title=title, style=style, body=body)


def _picture(drawings: Drawings, name: str, caption: str) -> str:
    """A picture drawn in the reader's colours."""
    drawn = []
    for dark in (True, False):
        with themed(dark):
            encoded = base64.b64encode(svg(drawings[name]()).encode()).decode()
        drawn.append(f"data:image/svg+xml;base64,{encoded}")
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{drawn[0]}">'
        f'<img src="{drawn[1]}" alt="{caption}"></picture>'
    )


def _rendered(template: str, **values: Any) -> str:
    source = Path(__file__).with_name(template).read_text(encoding="utf-8")
    return str(Template(source, keep_trailing_newline=True).render(values))
