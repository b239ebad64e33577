"""Model cards: written from `card.md` and what a run holds, with a section of scores that can be brought up to date."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from pi_lora.models.files import read_config
from pi_lora.recipe.schema import Recipe
from pi_lora.report.pictures import picture_lines
from pi_lora.report.run import MeasuredRun
from pi_lora.report.tables import eval_results, public_name, scores_sections
from pi_lora.run import SCORES
from pi_lora.scaling.config import full_attention_rope, method_of, scale_of, window_of
from pi_lora.writing import write_whole

CARD = "README.md"
SCORES_BEGIN, SCORES_END = "<!-- scores -->", "<!-- end of scores -->"


def write_card(folder: Path, run: MeasuredRun | None = None) -> None:
    """Write into `folder` the card of `run`, by default its own, with the pictures there; raise ModelError."""
    write_whole(folder / CARD, str(_card(run or MeasuredRun(folder), folder)))


def merged_card(
    run: Path,
    merged: Path,
    checks: Sequence[str],
    facts: Mapping[str, str] | None = None,
    base: str = "",
    serving: Sequence[str] = (),
) -> str:
    """Return the card of `merged`, full weights made from the adapter folder `run`, which may hold nothing else.
    `checks` says what was checked, `facts` are further rows, `serving` the commands that serve it, and `base` is named
    if the adapter names none. Raise ModelError as `write_card`.
    """
    dtype = read_config(merged).get("dtype", "float32")
    rows = {"weights": f"base and adapter added in float32, stored in {dtype}", **(facts or {})}
    return str(_card(MeasuredRun(run, merged, base), None, checks, rows, serving))


def extended_card(run: MeasuredRun, serving: Sequence[str]) -> str:
    """Return the card of a base that was extended without tuning, with the scores of a probe that its folder holds."""
    return str(_card(run, None, facts={"weights": "those of the base, not tuned"}, serving=serving))


def refresh_scores(run: MeasuredRun) -> None:
    """Bring the scores in a card and its metadata up to date and keep the rest; raise ModelError as `write_card`."""
    if not (run.path / SCORES).is_dir():
        return
    file = run.path / CARD
    before = file.read_text(encoding="utf-8")
    section = re.compile(f"{SCORES_BEGIN}.*?{SCORES_END}", re.DOTALL)
    after = section.sub(lambda _: _scores_section(run, run.path), before)
    if results := eval_results(run.last_scores):
        card = ModelCard(after)
        card.data["model_name"], card.data["eval_results"] = run.name, results
        after = str(card)
    if after != before:
        write_whole(file, after)


def is_hub_id(name: str) -> bool:
    """Whether a name can be that of a model or data set on the hub, which rejects cards that link to anything else.

    >>> is_hub_id("huggyllama/llama-7b"), is_hub_id("builtin:tiny"), is_hub_id("data/*.jsonl")
    (True, False, False)
    """
    return public_name(name) == name and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def _card(
    run: MeasuredRun,
    pictures: Path | None,
    checks: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
    serving: Sequence[str] = (),
) -> ModelCard:
    """The card of a run, or of the weights merged from it."""
    recipe = run.recipe if run.has_recipe else None
    full = run.merged is not None or run.recipe.tuning.method == "full"
    card: ModelCard = ModelCard.from_template(
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
        facts=facts or {},
        checks=checks,
        serving=serving,
        scores=_scores_section(run, pictures),
    )
    return card


def _metadata(run: MeasuredRun, full: bool, recipe: Recipe | None) -> ModelCardData:
    """The YAML block that the hub reads, which must not name a base or data that are not on the hub."""
    method = method_of(run.config)
    scaling = "position-interpolation" if method == "pi" else method or "direct"
    fields: dict[str, Any] = {
        "library_name": "transformers" if full else "peft",
        "pipeline_tag": "text-generation",
        "tags": ["long-context", scaling, *[recipe.tuning.method if recipe else "lora"][run.untuned :], "pi-lora"],
        "datasets": [each.name for each in recipe.data.source if is_hub_id(each.name)] or None if recipe else None,
    }
    if results := eval_results(run.last_scores):
        name = public_name(run.base.name) if run.untuned else run.name
        fields |= {"model_name": name, "eval_results": results}
    if is_hub_id(run.base.name):
        fields |= {"base_model": run.base.name, "base_model_relation": "finetune" if full else "adapter"}
    return ModelCardData(**fields)


def _scores_section(run: MeasuredRun, pictures: Path | None) -> str:
    introduction = "With the adapter, before it was merged:\n\n" if run.is_merged and run.columns else ""
    sections = list(scores_sections(run.columns)) or ["Not measured yet."]
    pictured = picture_lines(pictures) if pictures else []
    return f"{SCORES_BEGIN}\n{introduction}" + "\n\n".join([*sections, *pictured]) + f"\n{SCORES_END}"
