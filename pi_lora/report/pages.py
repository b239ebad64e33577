"""What `pi-lora report` writes: the card of a run or the comparison of several, pictures, and one HTML page."""

import base64
import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.token import Token

from pi_lora.drawing import drawn, save, themed
from pi_lora.errors import DataError, ModelError, PiLoraError
from pi_lora.evaluation.results import PerplexityScores
from pi_lora.planning.memory import GIB
from pi_lora.planning.planning import CPU, GPUS, plan_recipe, target_of
from pi_lora.planning.text import hours_in_words
from pi_lora.recipe.files import dump_recipe
from pi_lora.report.card import CARD, SCORES_BEGIN, read_card, refresh_scores, write_card
from pi_lora.report.pictures import PICTURES, Drawings, drawings_of, picture_lines
from pi_lora.report.run import Run, commands
from pi_lora.report.summary import side_by_side

COMPARISON = Path("report")
TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), keep_trailing_newline=True)
HIDDEN = re.compile(r"\A---\n.*?\n---\n|<!--.*?-->", re.DOTALL)  # metadata and comments of a card
IMAGE = re.compile(rf"{PICTURES}/(\w+)\.png")


class Details(NamedTuple):
    """Rows of a name, what was planned and what was used; the commands that made a run, and its recipe."""

    name: str
    use: list[tuple[str, str, str]]
    commands: list[str]
    recipe: str


def write_report(runs: Sequence[Run], output: Path | None = None, html: bool = False) -> list[Path]:
    """Write the card of one run into its folder, or the comparison of several into `report/`, or into `output`, with
    pictures, and as an HTML page if asked. Raise DataError if it cannot be written, ModelError if two runs have one
    name or the card there is not pi-lora's.
    """
    names = [run.name for run in runs]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ModelError(f"{', '.join(doubled)}: is the name of several of these runs; rename a folder")
    folder = output or (runs[0].path if len(runs) == 1 else COMPARISON)
    card, page, own = folder / CARD, folder / "report.html", folder == runs[0].path
    if own and card.is_file() and SCORES_BEGIN not in read_card(card):
        raise ModelError(f"{card}: has no section for scores, so pi-lora did not write it; move it away")
    drawings = drawings_of(runs)
    pictures = [folder / PICTURES / f"{name}.png" for name in drawings]
    if link := next((each for each in (card, page, folder / PICTURES, *pictures) if each.is_symlink()), None):
        raise ModelError(f"{link}: is a link, which is not written through; remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with themed(dark=False):
            files = [save(draw(), file) for draw, file in zip(drawings.values(), pictures, strict=True)]
        files.append(card)
        if len(runs) > 1:
            card.write_text(comparison_page(runs, folder), encoding="utf-8")
        elif own and card.is_file():
            refresh_scores(runs[0])
        else:
            write_card(folder, runs[0])
        if html:
            page.write_text(html_page(read_card(card), drawings, list(map(details_of, runs))), encoding="utf-8")
            files.append(page)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}); choose another --output") from None
    return files


def comparison_page(runs: Sequence[Run], folder: Path) -> str:
    """Return the comparison in Markdown, with the pictures in `folder`, and a table for each measurement."""
    swept = [scores for run in runs if (scores := run.tuned("perplexity", PerplexityScores))]
    tuned = {
        name: {run.name: run.results[name][1] for run in runs if name in run.results}
        for name in sorted({name for run in runs for name in run.results})
    }
    return TEMPLATES.get_template("comparison.md").render(
        runs=runs,
        tables=[side_by_side(name, scores).rstrip("\n") for name, scores in tuned.items() if any(scores.values())],
        pictures=list(picture_lines(folder)),
        sweeps=sorted({(scores.data, scores.stride) for scores in swept}),
    )


def html_page(card: str, drawings: Drawings, runs: Sequence[Details] = ()) -> str:
    """Return a card in Markdown as an HTML page that needs no other file, pictures inside, light and dark; below it the
    details of `runs`, each of which can be hidden. Names come from elsewhere: HTML in the card is shown as text, and
    images other than `drawings` by their captions. The metadata is left out.
    """
    text = HIDDEN.sub("", card)
    title = next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), "pi-lora")
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")

    def image(_renderer: object, tokens: Sequence[Token], index: int, *_: object) -> str:
        found, caption = IMAGE.fullmatch(str(tokens[index].attrs["src"])), html.escape(tokens[index].content)
        # An image from elsewhere would tell its server who reads the page.
        return _picture(drawings, found[1], caption) if found and found[1] in drawings else caption

    markdown.add_render_rule("image", image)
    body = markdown.render(text).replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    for number, run in enumerate(runs, 1):
        cell = f"<td>{escapeHtml(run.name)}</td>"
        body = body.replace(f"<tr>\n{cell}", f'<tr class="run-{number}">\n{cell}')
    return TEMPLATES.get_template("page.html").render(title=title, body=body, runs=runs)


def _picture(drawings: Drawings, name: str, caption: str) -> str:
    """A picture drawn in the reader's colours."""
    addresses = []
    for dark in (True, False):
        with themed(dark):
            encoded = base64.b64encode(drawn(drawings[name](), "svg")).decode()
        addresses.append(f"data:image/svg+xml;base64,{encoded}")
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{addresses[0]}">'
        f'<img src="{addresses[1]}" alt="{caption}"></picture>'
    )


def details_of(run: Run) -> Details:
    """Return what a page says of a run; nothing of its plan where its base is not here."""
    return Details(run.name, list(_use(run)), list(commands(run)), dump_recipe(run.recipe))


def _use(run: Run) -> Iterator[tuple[str, str, str]]:
    used = run.made_with
    if used is None:
        return
    try:
        plan = plan_recipe(run.recipe, target_of(run.recipe), None if run.recipe.hardware.gpus else GPUS[CPU])
    except PiLoraError:  # gone, or on a hub that cannot be asked
        return
    if used.trainable_parameters:
        yield "trained parameters", f"{plan.trained:,}", f"{used.trainable_parameters:,}"
    yield "tokens", f"{plan.tokens:,}", f"{used.tokens:,}"
    yield "peak memory", f"{plan.memory.peak / GIB:.1f} GiB", f"{used.peak_memory / GIB:.1f} GiB"
    planned = hours_in_words(plan.hours) if plan.hours is not None else "not known"
    yield f"time ({plan.gpu.name} planned, {used.hardware} used)", planned, hours_in_words(used.seconds / 3600)
