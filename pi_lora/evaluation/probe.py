"""Comparison of scalings before any tuning: the plain base and each untuned scaling, measured on the same documents and
passkeys.
"""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel
from rich.table import Table

from pi_lora.distributed import is_main_process
from pi_lora.errors import ModelError
from pi_lora.evaluation.changes import change_of, in_words
from pi_lora.evaluation.duration import budget_here
from pi_lora.evaluation.measurement import Metric, Scores, Session
from pi_lora.evaluation.passkey import PasskeyScores
from pi_lora.evaluation.perplexity import PerplexityScores
from pi_lora.evaluation.prompting import Prompting
from pi_lora.evaluation.suite import (
    MEASUREMENTS,
    Requested,
    marked,
    metrics_of,
    prepare,
    say_training_notes,
    setting_of,
)
from pi_lora.models.device import hardware, has_fast_bfloat16, versions
from pi_lora.models.loaded import load_model
from pi_lora.models.source import Base, ModelSource
from pi_lora.recipe.budget import SHARE
from pi_lora.recipe.evaluation import PasskeyOptions, PerplexityOptions, ProbeOptions
from pi_lora.recipe.factors import Factors, read_factors
from pi_lora.run import BASE, STEP_0
from pi_lora.scaling.extension import Extension
from pi_lora.scaling.scalings import Method
from pi_lora.storage import check_can_write, read_json, write_json
from pi_lora.types import Json, ui

# Scalings that no recipe tunes by default; a probe shows them for comparison.
FOR_COMPARISON = ("direct", "dynamic")
# The most distances of passkeys.
MAX_DEPTHS = 8
# A scaling gets passkeys if the perplexity at L' is at most this multiple of the lowest.
PROMISING_RATIO = 1.25
# No tuning is needed up to this multiple of the base's perplexity, and from this percentage of retrieved passkeys.
MAX_PERPLEXITY_RATIO = 1.05
MIN_PASSKEYS_PERCENT = 80.0


class Probed(BaseModel):
    """The scores of one scaling; `direct` is the plain base. Only promising scalings have passkeys."""

    perplexity: PerplexityScores
    passkey: PasskeyScores | None = None

    @property
    def scores(self) -> list[Scores]:
        """The scores of all measurements."""
        return [scores for scores in (self.perplexity, self.passkey) if scores]

    @property
    def windows(self) -> list[Metric]:
        """The perplexity in the original window L and in the target window L'."""
        return metrics_of(self.perplexity)[:2]

    @property
    def retrieved(self) -> Metric | None:
        """The share of retrieved passkeys in percent."""
        return metrics_of(self.passkey)[1] if self.passkey else None


class TargetResult(BaseModel):
    """The scalings at one target (L', tokens).

    Attributes:
        target: L' in tokens.
        best: The scaling with the lowest perplexity at L', of those that retrieve the most passkeys within intervals.
        enough: Whether the best scaling needs no tuning.
        summary: The perplexity and the passkeys of the best scaling in a sentence.
        scalings: The scores by scaling.
        factors: The file with the divisors of the scaling `factors`.
        divisors: These divisors.
    """

    target: int
    best: Method
    enough: bool
    summary: str
    scalings: dict[Method, Probed]
    factors: str | None = None
    divisors: Factors | None = None

    @property
    def sections(self) -> Json:
        """The sections of a recipe that extends by the best scaling."""
        factors = self.divisors.model_dump() if self.divisors and self.best == "factors" else None
        return {"scaling": self.best, "context": {"target": self.target, "factors": factors}}

    @property
    def text(self) -> PerplexityOptions:
        """The options that name the text, the same for all scalings."""
        return self.scalings[self.best].perplexity.options

    def to_tune(self) -> tuple[Json, str] | None:
        """Return the sections of a recipe and the summary; None if the best is for comparison only. Raise ModelError if
        that one needs no tuning.
        """
        if self.best not in FOR_COMPARISON:
            return self.sections, self.summary
        if self.enough:
            raise ModelError(f"--probe: {self.summary}; no tuning is needed; to tune all the same, leave --probe out")
        return None


class Probe(BaseModel):
    """A probed model, its original window (L, tokens), a result for each target, and the hardware and versions.
    `weights` is a digest of the weights.
    """

    model: str
    original: int
    weights: str = ""
    hardware: str = ""
    versions: dict[str, str] = {}
    targets: list[TargetResult]

    def check_is_of(self, base: Base) -> None:
        """Raise ModelError if another model was probed. Weights on this machine are compared, otherwise the names."""
        is_same = Path(self.model).name == Path(base.name).name
        if self.weights and base.commit is None:
            with suppress(ModelError):  # a shipped config has no weights
                is_same = self.weights == base.weights_digest
        if self.original != base.rope.trained or not is_same:
            raise ModelError(
                f"--probe: is of {self.model}, with other weights or another window than {base.name}; "
                "probe that, or leave the option out"
            )

    def at(self, target: int) -> TargetResult:
        """Return the scalings at a target; raise ModelError if it was not probed."""
        for result in self.targets:
            if result.target == target:
                return result
        raise ModelError(f"--probe: was not made for --target {target}; probe again")

    def as_json(self) -> Json:
        """Return the content of a file that `read_probe` reads."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def scores_by_stage(self, target: int, scaling: Method) -> dict[str, list[Scores]]:
        """Return the scores of the base and of one untuned scaling, by stage; raise ModelError if it was not probed."""
        probed = self.at(target).scalings
        if scaling not in probed:
            raise ModelError(f"--probe: has {', '.join(probed)}, not {scaling}; probe it, or leave the option out")
        return {BASE: probed["direct"].scores, STEP_0: probed[scaling].scores}


def probe(
    base: ModelSource,
    options: ProbeOptions,
    *,
    json: Path | None = None,
) -> Probe:
    """Measure a plain base without and with each scaling, untuned, at each target; all in the same dtype.

    Results are journalled until the end, so that an interrupted probe continues. Raise ScalingError if a scaling does
    not suit the model, ModelError if the model is a run, DataError if no document is long enough.
    """
    if base.adapter:
        raise ModelError(f"{base.name}: is extended already; probe the base, {base.base.name}")
    check_can_write(json)
    base = replace(base, dtype=base.dtype or ("bfloat16" if has_fast_bfloat16() else None))
    for note in base.notes:
        ui.say(note)
    factors = read_factors(Path(options.factors)) if options.factors else None
    # Mistakes of all targets are reported before weights are read.
    models = {target: _models_to_probe(base, target, options, factors) for target in sorted(options.target)}
    requested = {target: prepare(_requested(base, target, options), [base]) for target in models}
    say_training_notes(requested[min(models)], [base])
    prompting = Prompting([base])
    with Session(say=ui.say, journalled=True) as session:
        results = [_probe_target(target, models[target], requested[target], prompting, session) for target in models]
        searched = {"factors": options.factors, "divisors": factors}
        probed = Probe(
            model=base.name,
            original=base.rope.trained,
            weights=base.base.weights_digest,
            hardware=hardware(),
            versions=versions(),
            targets=[result.model_copy(update=searched) for result in results],
        )
        if json and is_main_process():
            write_json(json, probed.as_json())
    return probed


def _models_to_probe(
    base: ModelSource, target: int, options: ProbeOptions, factors: Factors | None
) -> dict[Method, ModelSource]:
    """Return the base as `direct`, and the base under each scaling, with these divisors for the scaling `factors`."""
    models: dict[Method, ModelSource] = {"direct": base}
    suitable = tuple(method for method in base.rope.scalings if method not in (*FOR_COMPARISON, "factors"))
    requested = cast("tuple[Method, ...]", options.scalings) or suitable
    if factors and "factors" not in requested:
        requested = (*requested, "factors")
    for method in requested:
        if method != "direct":
            divisors = factors.model_dump() if factors and method == "factors" else {}
            models[method] = base.extended(Extension(target, scaling=method, **divisors))
    return models


def _requested(base: ModelSource, target: int, options: ProbeOptions) -> Requested:
    """Return the options of both measurements at a target."""
    budget = budget_here() // SHARE
    perplexity = PerplexityOptions(
        data=options.data,
        column=options.column,
        windows=(base.rope.trained, target),
        stride=base.rope.trained,
        truncate=target,
        documents=options.documents,
    )
    passkey = PasskeyOptions(target=target, chat=options.chat, trials=options.trials, seed=options.seed)
    amount = passkey.amount(budget)
    return {
        "perplexity": perplexity.changed(**perplexity.sizes(target, [], budget)),
        "passkey": passkey.changed(**amount | {"depths": min(MAX_DEPTHS, amount["depths"])}),
    }


def _probe_target(
    target: int,
    models: Mapping[Method, ModelSource],
    requested: Mapping[str, Any],
    prompting: Prompting,
    session: Session,
) -> TargetResult:
    """Measure the base and the scalings at one target with prepared options."""

    def scores_of(scaling: Method, name: str) -> Any:
        model = models[scaling]
        with ui.progress(f"{scaling} at {target:,}, {name}") as session.progress:
            loaded = load_model(model)
            # The base is the first that is loaded, and decides.
            options = {each: prompting.settled(options, loaded) for each, options in requested.items()}
            return marked(MEASUREMENTS[name].run(loaded, options[name], session), model.texts)

    scalings = {scaling: Probed(perplexity=scores_of(scaling, "perplexity")) for scaling in models}
    lowest = min(probed.windows[1].value for probed in scalings.values())
    promising_ratio = PROMISING_RATIO if requested["passkey"].trials != 1 else 1.0
    for scaling, probed in scalings.items():
        # Divisors that were searched are asked: they were chosen for retrieval.
        if scaling == "factors" or probed.windows[1].value <= promising_ratio * lowest:
            probed.passkey = scores_of(scaling, "passkey")
    return choose_best(target, scalings)


def choose_best(target: int, scalings: dict[Method, Probed]) -> TargetResult:
    """Return the best scaling with a summary, and whether it needs no tuning."""
    shares = {name: probed.retrieved for name, probed in scalings.items() if probed.retrieved}
    most = max(share.value for share in shares.values())
    # The scalings whose intervals reach the highest share.
    equal = [name for name, share in shares.items() if share.interval and share.interval[1] >= most]
    best = min(equal, key=lambda name: scalings[name].windows[1].value)
    before = scalings["direct"].windows[0]
    in_original_window, in_target_window = scalings[best].windows
    keeps_perplexity = max(in_original_window.value, in_target_window.value) <= MAX_PERPLEXITY_RATIO * before.value
    passkeys = shares[best]
    summary = (
        f"{best} keeps {in_target_window.value:.2f} at {in_target_window.at:,} "
        f"({before.value:.2f} at {before.at:,} before) "
        f"and finds {passkeys.value:.0f} % of {len(passkeys.values)} passkeys without tuning"
    )
    return TargetResult(
        target=target,
        best=best,
        enough=keeps_perplexity and passkeys.value >= MIN_PASSKEYS_PERCENT,
        summary=summary,
        scalings=scalings,
    )


def read_probe(file: Path) -> Probe:
    """Read a probe from a file; raise ModelError if the file holds something else."""
    return read_json(file, Probe, "probe again")


def probe_table(probed: Probe, result: TargetResult) -> Table:
    """Return a row for each scaling: the perplexity in both windows with the verdict against the base in the original
    window, and the passkeys.
    """
    base = result.scalings["direct"].windows[0]
    headings = [f"perplexity at {window:,}" for window in (probed.original, result.target)]
    table = Table("scaling", *headings, "passkeys", caption_justify="left")
    table.title = f"{probed.model}, without tuning"
    for name, scaling in result.scalings.items():
        cells = []
        for metric in scaling.windows:
            row = change_of(base, metric)
            words = in_words(row.change, row.interval, row.unit, higher_is_better=False)
            cells.append(f"{row.run:.2f}, {words}")
        passkeys = scaling.retrieved.text if scaling.retrieved else "not asked"
        table.add_row(name, *cells, passkeys)
    best = result.scalings[result.best]
    settings = [setting_of(scores) for scores in best.scores]
    table.caption = "; ".join([*settings, str(best.perplexity.dtype), "95 % intervals"])
    return table


def next_command(probed: Probe, result: TargetResult, json: Path | None) -> str:
    """Return the command that makes the extended model: without tuning if that is enough, else a recipe."""
    arguments = [probed.model, "--target", str(result.target)]
    if json:
        arguments += ["--probe", str(json)]
    if not result.enough:
        if result.text.data:
            arguments += ["--data", result.text.data]
        if result.text.column != "text":
            arguments += ["--column", result.text.column]
        return shlex.join(["pi-lora", "new", *arguments])
    folder = f"models/{result.best}_{result.target}"
    if result.best == "factors" and not json:
        arguments += ["--factors", str(result.factors)]
    return shlex.join(["pi-lora", "extend", *arguments, "--scaling", result.best, "--output", folder])
