"""A card as one HTML page that needs nothing beside it: its pictures are inside, light and dark."""

import base64
import html
import re
from pathlib import Path

from markdown_it import MarkdownIt

from pi_lora.drawing import svg, themed
from pi_lora.report.pictures import Drawings
from pi_lora.report.tables import PICTURES

STYLE = Path(__file__).parent / "page.css"
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
IMAGE = re.compile(rf'<img src="{PICTURES}/(\w+)\.png" alt="([^"]*)" />')


def html_page(card: str, drawings: Drawings) -> str:
    """The page of a card in Markdown, without the metadata at its head; `drawings` are what its pictures show.

    HTML in the card is shown as it is written, not obeyed: names of models and data come from elsewhere.
    """
    text = COMMENT.sub("", FRONT_MATTER.sub("", card))
    title = next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), "pi-lora")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    body = IMAGE.sub(lambda image: _picture(drawings, image[1], image[2]), body)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
{body}</body>
</html>
"""


def _picture(drawings: Drawings, name: str, caption: str) -> str:
    """A picture that is drawn for the reader's colours."""
    light, dark = (_drawn(drawings, name, dark) for dark in (False, True))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}"><img src="{light}" alt="{caption}">'
        "</picture>"
    )


def _drawn(drawings: Drawings, name: str, dark: bool) -> str:
    with themed(dark):
        drawn = svg(drawings[name]())
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn.encode()).decode()}"
