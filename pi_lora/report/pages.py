"""What `pi-lora report` writes: the card of a run or the comparison of several, pictures, and one HTML page."""

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template
from markdown_it import MarkdownIt

from pi_lora.drawing import svg, themed
from pi_lora.errors import DataError, ModelError
from pi_lora.evaluation.results import PasskeyScores, PerplexityScores
from pi_lora.report.card import CARD, check_own_card, refresh_scores, run_card
from pi_lora.report.pictures import PICTURES, Drawings, drawings_of, picture_lines, write_pictures
from pi_lora.report.run import Run, S
from pi_lora.report.summary import side_by_side

COMPARISON = Path("report")
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
IMAGE = re.compile(rf'<img src="{PICTURES}/(\w+)\.png" alt="([^"]*)" />')


def write_report(runs: Sequence[Run], output: Path | None = None, html: bool = False) -> list[Path]:
    """Write the card of one run, or the comparison of several, with pictures, and as an HTML page if asked.

    The card of one run goes into its folder, a comparison into `report/`, unless `output` names another folder.

    Raises:
        DataError: the folder cannot be written.
        ModelError: two runs have the same name, or pi-lora did not write the card that is there.
    """
    names = [run.name for run in runs]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ModelError(f"{', '.join(doubled)}: is the name of several of these runs; rename a folder")
    folder = output or (runs[0].path if len(runs) == 1 else COMPARISON)
    if folder == runs[0].path:
        check_own_card(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _write(runs, folder, html)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}); choose another --output") from None


def _write(runs: Sequence[Run], folder: Path, html: bool) -> list[Path]:
    originals = {run.original for run in runs}
    drawings = drawings_of(
        _curves(runs, "perplexity", PerplexityScores),
        _curves(runs, "passkey", PasskeyScores),
        {run.name: run.log for run in runs if run.log},
        originals.pop() if len(originals) == 1 else None,
    )
    card, page = folder / CARD, folder / "report.html"
    files = [*write_pictures(drawings, folder / PICTURES), card]
    if len(runs) > 1:
        card.write_text(comparison_page(runs, folder), encoding="utf-8")
    elif folder == runs[0].path and card.is_file():
        refresh_scores(runs[0])
    else:
        run_card(runs[0], pictures=folder).save(card)
    if html:
        page.write_text(html_page(card.read_text(encoding="utf-8"), drawings), encoding="utf-8")
        files.append(page)
    return files


def _curves(runs: Sequence[Run], name: str, kind: type[S]) -> dict[str, S]:
    """By label: each stage of one run, or the tuned model of each of several."""
    if len(runs) == 1:
        return runs[0].main_stages(name, kind)
    return {run.name: found for run in runs if (found := run.tuned(name, kind))}


def comparison_page(runs: Sequence[Run], folder: Path) -> str:
    """Return the comparison in Markdown; the pictures are those in `folder`."""
    swept = [scores for run in runs if (scores := run.tuned("perplexity", PerplexityScores))]
    return _rendered(
        "comparison.md",
        runs=runs,
        tables=[table.rstrip("\n") for table in _tables(runs)],
        pictures=list(picture_lines(folder)),
        sweeps=sorted({(scores.data, scores.stride) for scores in swept}),
    )


def html_page(card: str, drawings: Drawings) -> str:
    """Return a card in Markdown as an HTML page that needs no other file: pictures are inside, light and dark.

    The metadata is left out. HTML in the card is shown as text: names of models and data come from elsewhere.
    """
    text = COMMENT.sub("", FRONT_MATTER.sub("", card))
    title = next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), "pi-lora")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    body = IMAGE.sub(lambda image: _picture(drawings, image[1], image[2]), body)
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return _rendered("page.html", title=title, style=style, body=body)


def _tables(runs: Sequence[Run]) -> Iterator[str]:
    """A table for each measurement of any tuned model."""
    for name in sorted({name for run in runs for name in run.results}):
        tuned = {run.name: run.results[name][1] for run in runs if name in run.results}
        if any(tuned.values()):
            yield side_by_side(name, tuned)


def _rendered(template: str, **values: Any) -> str:
    source = Path(__file__).with_name(template).read_text(encoding="utf-8")
    text: str = Template(source, keep_trailing_newline=True).render(values)
    return text


def _picture(drawings: Drawings, name: str, caption: str) -> str:
    """A picture drawn in the reader's colours."""
    drawn = {}
    for dark in (False, True):
        with themed(dark):
            drawn[dark] = base64.b64encode(svg(drawings[name]()).encode()).decode()
    source = "data:image/svg+xml;base64,"
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{source}{drawn[True]}">'
        f'<img src="{source}{drawn[False]}" alt="{caption}"></picture>'
    )
