"""Model cards: written from `card.md` and what a run holds, with pictures, and as an HTML page for `pi-lora report`."""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from huggingface_hub import ModelCard, ModelCardData

from pi_lora.drawing import VERMILION, figure_of, save
from pi_lora.errors import ModelError
from pi_lora.evaluation.suite import MEASUREMENTS, measuring_command
from pi_lora.models.composite import auto_class_of
from pi_lora.models.files import CARD, is_local, model_folder, public_name, read_card
from pi_lora.recipe.schema import Recipe
from pi_lora.report.scores import MeasuredRun, code_cell, eval_results, literal, public_setting, scores_section
from pi_lora.report.verdict import verdict_of
from pi_lora.run import BASE, STEP_0, check_tuned
from pi_lora.scaling.rope import Rope
from pi_lora.scaling.scalings import SCALINGS
from pi_lora.storage import write_whole
from pi_lora.types import Json

PICTURES = "pictures"
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForMultimodalLM": "any-to-any",
}
LICENSE_KEYS = ("license", "license_name", "license_link")
PAGE = Path(__file__).with_name("page.html")
SCORES_BEGIN, SCORES_END = "<!-- scores -->", "<!-- end of scores -->"
METADATA_OR_COMMENT = re.compile(r"\A---\n.*?\n---\n|<!--.*?-->", re.DOTALL)
# The HTML of an image of the card, rendered with images disabled.
PICTURE = re.compile(rf'!<a href="{PICTURES}/(?P<file>[\w-]+\.png)">(?P<caption>[^<"]*)</a>')


def write_report(path: Path, *, html: bool = False) -> list[Path]:
    """Write the card of a run into the folder of the run, with pictures and on request an HTML page; return the files.

    Raise ModelError if the folder is no run that was measured, if a result cannot be read, or if pi-lora did not write
    the card that is there; OSError if nothing can be written.
    """
    run = MeasuredRun(path)
    card = path / CARD
    check_tuned(run)
    if not run.last_scores:
        recipe = run.recipe if run.has_recipe else None
        raise ModelError(f"{path}: was not measured yet; measure it with: {measuring_command(str(path), recipe)}")
    if card.is_file() and SCORES_BEGIN not in card.read_text(encoding="utf-8"):
        raise ModelError(f"{card}: has no section for scores, so pi-lora did not write it; move it away")
    files = [*draw_run(run), card]
    if card.is_file():
        refresh_scores(run)
    else:
        write_card(path)
    if html:
        page = path / "report.html"
        content = html_page(card.read_text(encoding="utf-8"), path, run.name)
        write_whole(page, content)
        files.append(page)
    return files


def write_card(folder: Path) -> None:
    """Write the card of the run in a folder, with the pictures there; raise ModelError if a file is damaged."""
    write_whole(folder / CARD, card_of(MeasuredRun(folder)))


def card_of(run: MeasuredRun, serving: Sequence[str] = ()) -> str:
    """Return the card of a run with the pictures of the run.

    Args:
        run: The run, or a model that was merged or extended.
        serving: For merged weights, the commands that serve them.

    Raises:
        ModelError: A file is damaged.
    """
    recipe = run.recipe if run.has_recipe else None
    rope = Rope(run.config)
    window = rope.window
    scale = rope.scale
    method = rope.method or "direct"
    of_base = recipe is not None and public_name(recipe.model.name) == public_name(run.base.name)
    kept = recipe is not None and recipe.scaling == "keep" and of_base
    # That of a base with a scaling, as Gemma 3 has.
    own_scale = 1.0
    window_before = run.metadata.base_window or run.metadata.original
    if window_before and scale > 1:
        own_scale = round(scale * window_before / window, 6)
    card = ModelCard.from_template(
        _metadata(run, recipe),
        template_path=str(Path(__file__).with_name("card.md")),
        run=run,
        recipe=recipe,
        full=run.has_full_weights,
        auto_class=auto_class_of(run.config),
        public_name=public_name,
        code_cell=code_cell,
        base_on_hub=is_hub_id(run.base.name),
        window=window,
        method=method,
        scaling=SCALINGS[method].summary.format(scale=scale, theta=rope.parameters["rope_theta"]),
        scale=scale,
        own_scale=own_scale,
        kept=kept,
        serving=serving,
        scores=_scores_section(run),
    )
    return str(card)


def refresh_scores(run: MeasuredRun) -> None:
    """Update the scores in a card and in the metadata, and keep the rest; raise ModelError as `card_of`."""
    if not run.scores:
        return
    file = run.path / CARD
    before = file.read_text(encoding="utf-8")
    section = re.compile(f"{SCORES_BEGIN}.*?{SCORES_END}", re.DOTALL)
    after = section.sub(lambda _: _scores_section(run), before)
    results = list(eval_results(run.last_scores))
    card = ModelCard(after)
    if results or card.data.get("eval_results"):
        card.data["model_name"] = run.name if results else None
        card.data["eval_results"] = results or None
        after = str(card)
    if after != before:
        write_whole(file, after)


def is_hub_id(name: str) -> bool:
    """Whether a name can be that of a model or data set on the hub, and not of a file or folder here.

    The hub rejects cards that link to anything else.

    >>> is_hub_id("huggyllama/llama-7b"), is_hub_id("builtin:tiny"), is_hub_id("data/*.jsonl")
    (True, False, False)
    """
    return not is_local(name) and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def _metadata(run: MeasuredRun, recipe: Recipe | None) -> ModelCardData:
    """The YAML block that the hub reads, which must not name a base or data that are not on the hub."""
    method = Rope(run.config).method or "direct"
    tags = ["long-context", "position-interpolation" if method == "pi" else method]
    if not run.untuned:
        tags.append(recipe.tuning.method if recipe else "lora")
    sources = recipe.data.source if recipe else ()
    datasets = [source.name for source in sources if is_hub_id(source.name)]
    results = list(eval_results(run.last_scores))
    name = public_name(run.base.name) if run.untuned else run.name
    base = None
    relation = None
    if is_hub_id(run.base.name):
        base = run.base.name
        relation = "finetune" if run.has_full_weights else "adapter"
    return ModelCardData(
        base_model=base,
        base_model_relation=relation,
        datasets=datasets or None,
        eval_results=results or None,
        library_name="transformers" if run.has_full_weights else "peft",
        model_name=name if results else None,
        pipeline_tag=PIPELINES[auto_class_of(run.config)],
        tags=[*tags, "pi-lora"],
        **_license_of_base(run),
    )


def _license_of_base(run: MeasuredRun) -> Json:
    """Return what the card of the base says of its licence, which holds for the run too."""
    origin = run.metadata.origin
    entries: Json = {}
    with suppress(ModelError):  # the base is not here
        folder, _ = model_folder(run.base.name, (origin and origin.commit) or run.base.revision)
        entries = read_card(folder)
    return {key: entries.get(key) for key in LICENSE_KEYS}


def _scores_section(run: MeasuredRun) -> str:
    """The verdict, scores and pictures of a run, between the comments that `refresh_scores` searches for."""
    paragraphs = []
    if run.merged and run.scores:
        paragraphs.append("With the adapter, before it was merged:")
    verdict = verdict_of(
        run.scores_at(BASE),
        run.scores_at(STEP_0),
        run.last_scores,
        run.metadata.original,
    )
    if verdict:
        lines = [f"- **{label}**: {literal(text)}." for label, text in verdict.items()]
        paragraphs.append("\n".join(lines))
    elif not run.scores and (run.merge or run.untuned):
        commands = "`pi-lora eval perplexity . --data TEXT` and `pi-lora eval passkey .`"
        paragraphs.append(f"Not measured yet: {commands} measure it, in this folder.")
    elif not run.scores:
        paragraphs.append("Not measured yet: `pi-lora eval all .` measures it, in the folder of the run.")
    # A picture follows the scores that it shows.
    for name in run.scores:
        paragraphs += [*scores_section(run, name), *_picture(run, name)]
    paragraphs += _picture(run, "loss")
    content = "\n\n".join(paragraphs)
    return f"{SCORES_BEGIN}\n{content}\n{SCORES_END}"


def _picture(run: MeasuredRun, name: str) -> list[str]:
    """Return the Markdown of a picture of the run, if it was drawn. Merged weights have none."""
    file = run.path / PICTURES / f"{name}.png"
    if run.merged or not file.is_file():
        return []
    return [f"![{literal(name)}]({PICTURES}/{quote(file.name)})"]


def draw_run(run: MeasuredRun) -> Iterator[Path]:
    """Draw the scores of base and run, and the training loss, into the folder of the run; yield the files."""
    for name in run.scores:
        # Scores with other options are not drawn on the same axis.
        alike, _ = run.side_by_side(name)
        *_, last = alike.values()
        panels = list(MEASUREMENTS[last.measurement].panels(alike))
        if panels:
            # A page shows a picture beside a table, or on a telephone: panels in one column can be read there.
            figure = figure_of(
                *panels,
                title=public_setting(last),
                window=run.metadata.original,
                most_columns=1,
            )
            yield save(figure, run.path / PICTURES / f"{name}.png")
    log = run.log
    if log:
        figure = figure_of(partial(_draw_loss, log))
        yield save(figure, run.path / PICTURES / "loss.png")


def _draw_loss(log: Sequence[Mapping[str, Any]], axes: Any) -> None:
    steps = [line["step"] for line in log]
    losses = [line["loss"] for line in log]
    axes.plot(steps, losses, color=VERMILION)
    axes.set(xlabel="step", ylabel="training loss (nats per token)")


def html_page(card: str, folder: Path, title: str) -> str:
    """Return a card as one HTML page that contains the pictures in `folder` and needs no other file.

    Names in a card come from elsewhere: HTML is shown as text. An image from another place is a link, since its server
    would learn who reads the page.
    """
    from markdown_it import MarkdownIt

    def picture(link: re.Match[str]) -> str:
        file = folder / PICTURES / link["file"]
        if not file.is_file():
            return link[0]
        encoded = base64.b64encode(file.read_bytes()).decode()
        return f'<img src="data:image/png;base64,{encoded}" alt="{link["caption"]}">'

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    rendered = markdown.render(METADATA_OR_COMMENT.sub("", card))
    body = PICTURE.sub(picture, rendered)
    template = Template(PAGE.read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), body=body)
