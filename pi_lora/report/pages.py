"""What `pi-lora report` writes: the card of a run with its pictures, and the card as an HTML page."""

import base64
import re
from pathlib import Path

from jinja2 import Template
from markdown_it import MarkdownIt

from pi_lora.errors import ModelError
from pi_lora.report.card import CARD, SCORES_BEGIN, refresh_scores, write_card
from pi_lora.report.pictures import PICTURES, draw_run
from pi_lora.report.run import MeasuredRun
from pi_lora.writing import write_whole

PAGE = Path(__file__).with_name("page.html")
# What Markdown makes of an image of the card where images are disabled.
PICTURE = re.compile(rf'!<a href="{PICTURES}/(?P<file>[\w-]+\.png)">(?P<caption>[^<"]*)</a>')
METADATA_OR_COMMENT = re.compile(r"\A---\n.*?\n---\n|<!--.*?-->", re.DOTALL)


def write_report(run: MeasuredRun, output: Path | None = None, html: bool = False) -> list[Path]:
    """Write the card of a run into its folder, or into `output`, with pictures, and as an HTML page if asked; return
    the files. Raise ModelError if pi-lora did not write the card that is there, OSError if nothing can be written.
    """
    folder = output or run.path
    card, page = folder / CARD, folder / "report.html"
    refreshed = folder == run.path and card.is_file()
    if refreshed and SCORES_BEGIN not in card.read_text(encoding="utf-8"):
        raise ModelError(f"{card}: has no section for scores, so pi-lora did not write it; move it away")
    folder.mkdir(parents=True, exist_ok=True)
    files = [*draw_run(run, folder), card]
    if refreshed:
        refresh_scores(run)
    else:
        write_card(folder, run)
    if html:
        write_whole(page, html_page(card.read_text(encoding="utf-8"), folder))
        files.append(page)
    return files


def html_page(card: str, folder: Path) -> str:
    """Return a card as one HTML page that needs no other file: the pictures in `folder` are inside. Names in a card
    come from elsewhere: its HTML is shown as text, and an image from another place, whose server would learn who reads
    the page, is a link.
    """

    def picture(link: re.Match[str]) -> str:
        file = folder / PICTURES / link["file"]
        if not file.is_file():
            return link[0]
        encoded = base64.b64encode(file.read_bytes()).decode()
        return f'<img src="data:image/png;base64,{encoded}" alt="{link["caption"]}">'

    text = METADATA_OR_COMMENT.sub("", card)
    body = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image").render(text)
    title = next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), "pi-lora")
    template = Template(PAGE.read_text(encoding="utf-8"))
    page: str = template.render(title=title, body=PICTURE.sub(picture, body))
    return page
