"""Model cards: written from `card.md` and what a run holds, with pictures, and as an HTML page for `pi-lora report`."""

import base64
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from huggingface_hub import ModelCard, ModelCardData

from pi_lora.drawing import VERMILION, figure_of, save
from pi_lora.errors import ModelError
from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.suite import MEASUREMENTS
from pi_lora.recipe.schema import Recipe
from pi_lora.report.scores import (
    MeasuredRun,
    eval_results,
    literal,
    public_name,
    public_setting,
    scores_sections,
)
from pi_lora.run import check_tuned
from pi_lora.scaling.config import full_attention_rope, method_of, scale_of, window_of
from pi_lora.storage import write_whole

CARD, PICTURES = "README.md", "pictures"
PAGE = Path(__file__).with_name("page.html")
SCORES_BEGIN, SCORES_END = "<!-- scores -->", "<!-- end of scores -->"
METADATA_OR_COMMENT = re.compile(r"\A---\n.*?\n---\n|<!--.*?-->", re.DOTALL)
# What Markdown makes of an image of the card where images are disabled.
PICTURE = re.compile(rf'!<a href="{PICTURES}/(?P<file>[\w-]+\.png)">(?P<caption>[^<"]*)</a>')


def write_report(path: Path, html: bool = False) -> list[Path]:
    """Write the card of a run into its folder, with pictures, and as an HTML page if asked; return the files. Raise
    ModelError if the folder is no run that was measured, if a result cannot be read, or if pi-lora did not write the
    card that is there; OSError if nothing can be written.
    """
    run, card, page = MeasuredRun(path), path / CARD, path / "report.html"
    check_tuned(run)
    if not run.last_scores:
        raise ModelError(f"{path}: was not measured yet; measure it with: pi-lora eval all {shlex.quote(str(path))}")
    if card.is_file() and SCORES_BEGIN not in card.read_text(encoding="utf-8"):
        raise ModelError(f"{card}: has no section for scores, so pi-lora did not write it; move it away")
    files = [*draw_run(run), card]
    if card.is_file():
        refresh_scores(run)
    else:
        write_card(path)
    if html:
        write_whole(page, html_page(card.read_text(encoding="utf-8"), path, run.name))
        files.append(page)
    return files


def write_card(folder: Path) -> None:
    """Write the card of the run in a folder, with the pictures there; raise ModelError if a file is damaged."""
    write_whole(folder / CARD, card_of(MeasuredRun(folder)))


def card_of(run: MeasuredRun, merged: Sequence[str] = (), serving: Sequence[str] = ()) -> str:
    """Return the card of a run with its pictures. Of merged weights, `merged` says what was added and checked, and
    `serving` has the commands that serve them. Raise ModelError if a file is damaged.
    """
    recipe = run.recipe if run.has_recipe else None
    full = run.untuned or run.merged is not None or run.recipe.tuning.method == "full"
    card = ModelCard.from_template(
        _metadata(run, full, recipe),
        template_path=str(Path(__file__).with_name("card.md")),
        run=run,
        recipe=recipe,
        full=full,
        public_name=public_name,
        base_on_hub=is_hub_id(run.base.name),
        window=window_of(run.config),
        method=method_of(run.config),
        scale=scale_of(run.config),
        theta=full_attention_rope(run.config)["rope_theta"],
        merged=merged,
        serving=serving,
        scores=_scores_section(run),
    )
    return str(card)


def refresh_scores(run: MeasuredRun) -> None:
    """Bring the scores in a card and its metadata up to date and keep the rest; raise ModelError as `card_of`."""
    if not run.scores:
        return
    file = run.path / CARD
    before = file.read_text(encoding="utf-8")
    section = re.compile(f"{SCORES_BEGIN}.*?{SCORES_END}", re.DOTALL)
    after = section.sub(lambda _: _scores_section(run), before)
    if results := eval_results(run.last_scores):
        card = ModelCard(after)
        card.data["model_name"], card.data["eval_results"] = run.name, results
        after = str(card)
    if after != before:
        write_whole(file, after)


def is_hub_id(name: str) -> bool:
    """Whether a name can be that of a model or data set on the hub, which rejects cards that link to anything else; a
    file or folder here is none.

    >>> is_hub_id("huggyllama/llama-7b"), is_hub_id("builtin:tiny"), is_hub_id("data/*.jsonl")
    (True, False, False)
    """
    public = public_name(name) == name and not Path(name).exists()
    return public and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def _metadata(run: MeasuredRun, full: bool, recipe: Recipe | None) -> ModelCardData:
    """The YAML block that the hub reads, which must not name a base or data that are not on the hub."""
    method = method_of(run.config) or "direct"
    tags = ["long-context", "position-interpolation" if method == "pi" else method]
    if not run.untuned:
        tags.append(recipe.tuning.method if recipe else "lora")
    sources = recipe.data.source if recipe else ()
    results = eval_results(run.last_scores)
    name = public_name(run.base.name) if run.untuned else run.name
    base = run.base.name if is_hub_id(run.base.name) else None
    return ModelCardData(
        base_model=base,
        base_model_relation=("finetune" if full else "adapter") if base else None,
        datasets=[source.name for source in sources if is_hub_id(source.name)] or None,
        eval_results=results or None,
        library_name="transformers" if full else "peft",
        model_name=name if results else None,
        pipeline_tag="text-generation",
        tags=[*tags, "pi-lora"],
    )


def _scores_section(run: MeasuredRun) -> str:
    """The scores of a run and its pictures, between the comments by which they are found again."""
    lines = list(scores_sections(run)) or ["Not measured yet."]
    if run.merged and run.scores:
        lines.insert(0, "With the adapter, before it was merged:")
    for file in () if run.merged else sorted((run.path / PICTURES).glob("*.png")):
        lines.append(f"![{literal(file.stem)}]({PICTURES}/{quote(file.name)})")
    return f"{SCORES_BEGIN}\n" + "\n\n".join(lines) + f"\n{SCORES_END}"


def draw_run(run: MeasuredRun) -> Iterator[Path]:
    """Draw the scores of a run and its base, and the loss of its training, into its folder; yield each file."""
    for name in run.scores:
        alike, _ = run.side_by_side(name)  # what was measured otherwise is not drawn on the same axis
        *_, last = alike.values()
        if panels := MEASUREMENTS[last.measurement].panels(alike):
            figure = figure_of(*panels, title=public_setting(last), window=run.metadata.original)
            yield save(figure, run.path / PICTURES / f"{name}.png")
    if run.log:
        yield save(figure_of(partial(_loss, run.log)), run.path / PICTURES / "loss.png")


def comparison_picture(measurements: Sequence[Mapping[str, Scores]], original: int, file: Path) -> None:
    """Draw several models, the panels of each measurement."""
    panels = []
    for scores in measurements:
        panels += MEASUREMENTS[next(iter(scores.values())).measurement].panels(scores)
    save(figure_of(*panels, window=original), file)


def _loss(log: Sequence[Mapping[str, Any]], axes: Any) -> None:
    axes.plot([line["step"] for line in log], [line["loss"] for line in log], color=VERMILION)
    axes.set(xlabel="step", ylabel="training loss (nats per token)")


def html_page(card: str, folder: Path, title: str) -> str:
    """Return a card as one HTML page that needs no other file: the pictures in `folder` are inside. Names in a card
    come from elsewhere: its HTML is shown as text, and an image from another place, whose server would learn who reads
    the page, is a link.
    """
    from markdown_it import MarkdownIt

    def picture(link: re.Match[str]) -> str:
        file = folder / PICTURES / link["file"]
        if not file.is_file():
            return link[0]
        encoded = base64.b64encode(file.read_bytes()).decode()
        return f'<img src="data:image/png;base64,{encoded}" alt="{link["caption"]}">'

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    body = PICTURE.sub(picture, markdown.render(METADATA_OR_COMMENT.sub("", card)))
    return Template(PAGE.read_text(encoding="utf-8")).substitute(title=escape(title), body=body)
