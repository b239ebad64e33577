"""Which scaling suits a model before any tuning: the base as it is and each untuned scaling, measured on the same
documents and passkeys.
"""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel
from rich.table import Table

from pi_lora.distributed import is_main_process
from pi_lora.drawing import sparkline
from pi_lora.errors import ModelError
from pi_lora.evaluation.measurement import Metric, Session
from pi_lora.evaluation.passkey import PasskeyScores
from pi_lora.evaluation.perplexity import PerplexityScores
from pi_lora.evaluation.suite import MEASUREMENTS, metrics_of, setting_of
from pi_lora.models.machine import device, hardware, has_fast_bfloat16, versions
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import PasskeyOptions, PerplexityOptions, ProbeOptions
from pi_lora.report.comparison import change_of, verdict
from pi_lora.scaling.config import Extension, Method, methods_for
from pi_lora.storage import cache_folder, check_can_write, read_json, write_json
from pi_lora.types import How, Json

# Scalings that no recipe tunes by default: a probe shows them beside the others.
FOR_COMPARISON = ("direct", "dynamic")
# Scalings that are probed by default, of those that suit the model: pi, yarn and theta of a plain base.
USUAL = 3
# Tokens of documents for each scaling, and as many of passkeys at each distance; at least one of both.
SAMPLE, SAMPLE_ON_CPU = 2**15, 2**14
MOST_DOCUMENTS, MOST_TRIALS = 12, 10
# Distances of passkeys: with several trials at each, and with one.
DEPTHS, FEW_DEPTHS = 8, 4
# A scaling whose perplexity at L' is over so many times the lowest is asked for no passkeys.
PROMISING = 1.25
# No tuning is needed if perplexity is at most so many times the base's in its window, and so many passkeys are found.
KEPT, RETRIEVED = 1.05, 80.0


class Probed(BaseModel):
    """The scores of one scaling; `direct` is the base as it is. Passkeys are asked of promising scalings only."""

    perplexity: PerplexityScores
    passkey: PasskeyScores | None = None

    @property
    def windows(self) -> list[Metric]:
        """The perplexity in the original window L and in the target window L'."""
        return metrics_of(self.perplexity)[:2]

    @property
    def retrieved(self) -> Metric | None:
        """The share of passkeys in percent."""
        return metrics_of(self.passkey)[1] if self.passkey else None


class Reach(BaseModel):
    """The scalings at one target (L', tokens). `best` has the lowest perplexity there of those that find the most
    passkeys, within the intervals; `enough` says that it needs no tuning.
    """

    target: int
    best: Method
    enough: bool
    summary: str
    scalings: dict[Method, Probed]

    def to_tune(self) -> tuple[Method, str] | None:
        """Return the best scaling and the summary, unless the best is for comparison only. Raise ModelError if that
        is enough.
        """
        if self.best not in FOR_COMPARISON:
            return self.best, self.summary
        if self.enough:
            raise ModelError(f"--probe: {self.summary}; no tuning is needed; to tune all the same, leave --probe out")
        return None


class Probe(BaseModel):
    """A probed model, its original window (L, tokens), a `Reach` for each target, and what it was measured on."""

    model: str
    original: int
    hardware: str = ""
    versions: dict[str, str] = {}
    targets: list[Reach]

    def at(self, target: int) -> Reach:
        """Return the scalings at a target; raise ModelError if it was not probed."""
        for reach in self.targets:
            if reach.target == target:
                return reach
        raise ModelError(f"--probe: was not made for --target {target}; probe again")


def probe(base: Model, options: ProbeOptions, json: Path | None = None, how: How = How()) -> Probe:
    """Measure a plain base as it is and under each scaling, untuned, at each target; all in the same arithmetic.

    What was measured is kept until the end, so that an interrupted probe continues. The best scalings stay in the
    cache, where `pi-lora train` reads them. Raise ScalingError if a scaling does not suit the model, ModelError if it
    is a run, DataError if no document is long enough.
    """
    if base.adapter:
        raise ModelError(f"{base.name}: brings its own scaling; probe its base, {base.base}")
    check_can_write(json)
    dtype = how.dtype or ("bfloat16" if has_fast_bfloat16() else None)
    with Session(say=how.say, shared=True) as session:

        def measure(name: str, model: Model, title: str, asked: Any) -> Any:
            with how.progress(f"{title}, {name}") as session.progress:
                return MEASUREMENTS[name].run(model.load(dtype), asked, session)

        reaches = [_reach(base, target, options, measure) for target in sorted(options.target)]
        probed = Probe(model=base.name, original=base.window, hardware=hardware(), versions=versions(), targets=reaches)
        if is_main_process():
            for reach in reaches:
                write_json(_kept_file(base.name, reach.target), reach.model_dump(include={"best", "summary"}))
            if json:
                write_json(json, probed.model_dump(mode="json", by_alias=True, exclude_unset=True))
    return probed


def _reach(base: Model, target: int, options: ProbeOptions, measure: Callable[..., Any]) -> Reach:
    """Measure the base and its scalings at one target; the shortest target shows whether they are possible."""
    models: dict[Method, Model] = {"direct": base}
    for method in cast("tuple[Method, ...]", options.scalings) or methods_for(base.config)[:USUAL]:
        if method != "direct":
            models[method] = base.extended(Extension(target, scaling=method))
    sample = max(1, (SAMPLE_ON_CPU if device().type == "cpu" else SAMPLE) // target)
    trials = options.trials or min(MOST_TRIALS, sample)
    losses_of = PerplexityOptions(
        data=options.data,
        column=options.column,
        windows=(base.window, target),
        stride=base.window,
        truncate=target,
        documents=options.documents or min(MOST_DOCUMENTS, sample),
    )
    losses_of = MEASUREMENTS["perplexity"].prepare(losses_of, [base])  # asks for a text before weights are read
    depths, promising = (DEPTHS, PROMISING) if trials > 1 else (FEW_DEPTHS, 1.0)
    keys_of = PasskeyOptions(target=target, depths=depths, trials=trials, seed=options.seed)
    scalings = {
        name: Probed(perplexity=measure("perplexity", model, f"{name} at {target:,}", losses_of))
        for name, model in models.items()
    }
    lowest = min(each.windows[1].value for each in scalings.values())
    for name, each in scalings.items():
        if each.windows[1].value <= promising * lowest:
            each.passkey = measure("passkey", models[name], f"{name} at {target:,}", keys_of)
    return decided(target, scalings)


def decided(target: int, scalings: dict[Method, Probed]) -> Reach:
    """Return the best scaling, whether it needs no tuning, and what it keeps and finds without."""
    shares = {name: share for name, each in scalings.items() if (share := each.retrieved)}
    most = max(share.value for share in shares.values())
    equal = [name for name, share in shares.items() if share.interval and share.interval[1] >= most]
    best = min(equal, key=lambda name: scalings[name].windows[1].value)
    before, (inside, beyond), keys = scalings["direct"].windows[0], scalings[best].windows, shares[best]
    kept = max(inside.value, beyond.value) <= KEPT * before.value
    keeps = f"{best} keeps {beyond.value:.2f} at {beyond.at:,} ({before.value:.2f} at {before.at:,} before)"
    summary = f"{keeps} and finds {keys.value:.0f} % of {len(keys.values)} passkeys without tuning"
    enough = kept and keys.value >= RETRIEVED
    return Reach(target=target, best=best, enough=enough, summary=summary, scalings=scalings)


def read_probe(file: Path) -> Probe:
    """Read what `probe` has written; raise ModelError if the file holds something else."""
    return read_json(file, Probe, "probe again")


def probe_table(probed: Probe, reach: Reach) -> Table:
    """Return a row for each scaling: perplexity in both windows and the base's in its own, with the verdict at
    95 %; loss by position as a picture; passkeys with their interval.
    """
    base = reach.scalings["direct"].windows[0]
    headings = [f"perplexity at {window:,}" for window in (probed.original, reach.target)]
    title = f"{probed.model}, without tuning"
    table = Table("scaling", *headings, "loss by position", "passkeys", title=title, caption_justify="left")
    for name, each in reach.scalings.items():
        rows = [change_of(base, metric) for metric in each.windows]
        cells = [f"{row.run:.2f}, {verdict(row.change, row.interval, row.unit, False)}" for row in rows]
        positions = each.perplexity.by_position
        losses = [part.loss for part in positions.bins] if positions else []
        table.add_row(name, *cells, sparkline(losses), each.retrieved.text if each.retrieved else "not asked")
    best = reach.scalings[reach.best]
    about = [setting_of(scores) for scores in (best.perplexity, best.passkey) if scores]
    table.caption = "; ".join([*about, str(best.perplexity.dtype), "95 % intervals"])
    return table


def next_command(probed: Probe, reach: Reach, json: Path | None) -> str:
    """Return the command that makes the extended model: without tuning if that is enough, else a recipe."""
    words = [probed.model, "--target", str(reach.target), *(["--probe", str(json)] if json else [])]
    if not reach.enough:
        return shlex.join(["pi-lora", "new", *words])
    folder = f"models/{reach.best}_{reach.target}"
    return shlex.join(["pi-lora", "extend", *words, "--scaling", reach.best, "--output", folder])


def better_scaling(model: str, target: int, scaling: str) -> list[str]:
    """Return a line if the last probe of this model found another scaling better than the one of a recipe."""
    file = _kept_file(model, target)
    kept = read_json(file, Json, "probe again") if file.is_file() else {"best": scaling}
    if kept["best"] in (scaling, *FOR_COMPARISON):
        return []
    return [f"scaling: {scaling}: in a probe, {kept['summary']}; scaling={kept['best']} tunes from there"]


def _kept_file(model: str, target: int) -> Path:
    """Return the file of the cache that holds the best scaling by the last probe of a model at a target."""
    return cache_folder() / "probes" / f"{model.strip('/').replace('/', '--')}-{target}.json"
