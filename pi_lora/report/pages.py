"""What `pi-lora report` writes: the card of a run or the comparison of several, with pictures, and as an HTML page."""

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markdown_it.token import Token

from pi_lora.errors import DataError, ModelError
from pi_lora.report.card import CARD, SCORES_BEGIN, refresh_scores, write_card
from pi_lora.report.pictures import PICTURES, draw_runs, picture_lines
from pi_lora.report.run import MeasuredRun, columns_of
from pi_lora.report.tables import metrics_table, public_name
from pi_lora.writing import write_whole

COMPARISON = Path("report")
TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), keep_trailing_newline=True)
METADATA_OR_COMMENT = re.compile(r"\A---\n.*?\n---\n|<!--.*?-->", re.DOTALL)


def write_report(runs: Sequence[MeasuredRun], output: Path | None = None, html: bool = False) -> list[Path]:
    """Write the card of one run into its folder, or the comparison of several into `report/`, or into `output`, with
    pictures, and as an HTML page if asked. Raise DataError if it cannot be written, ModelError if two runs have one
    name or the card there is not pi-lora's.
    """
    names = [run.name for run in runs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ModelError(f"{', '.join(repeated)}: is the name of several of these runs; rename a folder")
    folder = output or (runs[0].path if len(runs) == 1 else COMPARISON)
    card, page = folder / CARD, folder / "report.html"
    refreshed = folder == runs[0].path and card.is_file()
    if refreshed and SCORES_BEGIN not in card.read_text(encoding="utf-8"):
        raise ModelError(f"{card}: has no section for scores, so pi-lora did not write it; move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [*draw_runs(runs, folder), card]
        if len(runs) > 1:
            write_whole(card, comparison_page(runs, folder))
        elif refreshed:
            refresh_scores(runs[0])
        else:
            write_card(folder, runs[0])
        if html:
            write_whole(page, html_page(card.read_text(encoding="utf-8"), folder))
            files.append(page)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}); choose another --output") from None
    return files


def comparison_page(runs: Sequence[MeasuredRun], folder: Path) -> str:
    """Return the comparison in Markdown, with the metrics of all runs in one table and the pictures in `folder`."""
    columns = columns_of(runs)
    options: dict[str, list[Any]] = {}
    for results in columns.values():
        for name, scores in results.items():
            options.setdefault(name, []).append(scores.options)
    return TEMPLATES.get_template("comparison.md").render(
        runs=runs,
        public_name=public_name,
        table=metrics_table(columns),
        pictures=list(picture_lines(folder)),
        unlike=[name for name, each in options.items() if any(other != each[0] for other in each)],
    )


def html_page(card: str, folder: Path) -> str:
    """Return a card as one HTML page that needs no other file: the pictures in `folder` are inside. Names in a card
    come from elsewhere: its HTML is shown as text, and an image from another place, whose server would learn who reads
    the page, by its caption.
    """
    pictures = {f"{PICTURES}/{file.name}": file for file in (folder / PICTURES).glob("*.png")}

    def image(_renderer: object, tokens: Sequence[Token], index: int, *_: object) -> str:
        caption, file = escape(tokens[index].content), pictures.get(str(tokens[index].attrs["src"]))
        if file is None:
            return caption
        encoded = base64.b64encode(file.read_bytes()).decode()
        return f'<img src="data:image/png;base64,{encoded}" alt="{caption}">'

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    markdown.add_render_rule("image", image)
    text = METADATA_OR_COMMENT.sub("", card)
    title = next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), "pi-lora")
    return TEMPLATES.get_template("page.html").render(title=title, body=markdown.render(text))
