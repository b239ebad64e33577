"""What `pi-lora report` writes: the card of a run or the comparison of several, pictures, and one HTML page."""

import base64
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from pi_lora.drawing import svg, themed
from pi_lora.errors import DataError, ModelError
from pi_lora.evaluation.results import PasskeyScores, PerplexityScores
from pi_lora.report.card import CARD, check_own_card, refresh_scores, run_card
from pi_lora.report.pictures import PICTURES, Drawings, drawings_of, picture_lines, write_pictures
from pi_lora.report.run import Run, S, tuned_stage
from pi_lora.report.tables import markdown_table, side_by_side

HTML = "report.html"
COMPARISON = Path("report")
STYLE = Path(__file__).with_name("page.css")
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
IMAGE = re.compile(rf'<img src="{PICTURES}/(\w+)\.png" alt="([^"]*)" />')
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
{body}</body>
</html>
"""


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
    alone = runs[0] if len(runs) == 1 else None
    folder = output or (alone.path if alone else COMPARISON)
    if alone and folder == alone.path:
        check_own_card(folder)
    with _writable(folder):
        drawings = _drawings(runs)
        files = write_pictures(drawings, folder / PICTURES)
        card = folder / CARD
        if alone and folder == alone.path and card.is_file():
            refresh_scores(alone)
        elif alone:
            run_card(alone, pictures=folder).save(card)
        else:
            card.write_text(comparison_page(runs, folder), encoding="utf-8")
        files.append(card)
        if html:
            page = folder / HTML
            page.write_text(html_page(card.read_text(encoding="utf-8"), drawings), encoding="utf-8")
            files.append(page)
    return files


def comparison_page(runs: Sequence[Run], folder: Path) -> str:
    """Return the comparison in Markdown; the pictures are those in `folder`."""
    tables = [_how_made(runs), *_measured(runs)]
    parts = [f"# {len(runs)} runs side by side", *tables, *picture_lines(folder), _caution(runs)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def html_page(card: str, drawings: Drawings) -> str:
    """Return a card in Markdown as an HTML page that needs no other file: pictures are inside, light and dark.

    The metadata is left out. HTML in the card is shown as text: names of models and data come from elsewhere.
    """
    text = COMMENT.sub("", FRONT_MATTER.sub("", card))
    title = next((line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")), "pi-lora")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    body = IMAGE.sub(lambda image: _picture(drawings, image[1], image[2]), body)
    return PAGE.format(title=escape(title), style=STYLE.read_text(encoding="utf-8"), body=body)


def _drawings(runs: Sequence[Run]) -> Drawings:
    originals = {run.original for run in runs}
    return drawings_of(
        _curves(runs, "perplexity", PerplexityScores),
        _curves(runs, "passkey", PasskeyScores),
        {run.name: run.log for run in runs if run.log},
        originals.pop() if len(originals) == 1 else None,
    )


def _curves(runs: Sequence[Run], name: str, kind: type[S]) -> dict[str, S]:
    """By label: each stage of one run, or the tuned model of each of several."""
    if len(runs) == 1:
        return runs[0].main_stages(name, kind)
    return {run.name: found for run in runs if (found := run.tuned(name, kind))}


def _how_made(runs: Sequence[Run]) -> str:
    head = ["run", "base", "to", "scaling", "method", "steps", "tokens", "time", "on"]
    rows = []
    for run in runs:
        recipe, made = run.recipe, run.made_with
        cost = [f"{made['tokens']:,}", f"{made['seconds']:,.0f} s", made["hardware"]] if made else ["", "", ""]
        method = recipe.tuning.method + (f", rank {recipe.tuning.rank}" if recipe.tuning.method != "full" else "")
        what = [f"`{recipe.model.name}`", f"{recipe.context.target:,}", f"`{recipe.scaling}`", method]
        rows.append([run.name, *what, f"{recipe.training.steps:,}", *cost])
    return markdown_table(head, rows)


def _measured(runs: Sequence[Run]) -> Iterator[str]:
    """A table for each measurement of any tuned model."""
    for name in sorted({name for run in runs for name in run.scores}):
        stages = {run.name: run.scores.get(name, {}) for run in runs}
        tuned = {run: found[stage] for run, found in stages.items() if (stage := tuned_stage(found))}
        if any(tuned.values()):
            yield side_by_side(name, tuned)


def _caution(runs: Sequence[Run]) -> str:
    """Whether the numbers compare, as far as the results tell."""
    found = [scores for run in runs if (scores := run.tuned("perplexity", PerplexityScores))]
    sweeps = sorted({(scores.data, scores.stride) for scores in found})
    if len(sweeps) > 1:
        ways = "; ".join(f"`{data}` with stride {stride}" for data, stride in sweeps)
        return f"Perplexities were measured in different ways and do not compare: {ways}."
    return "One run and one seed each."


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


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror}); choose another --output") from None
