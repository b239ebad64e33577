"""Which scaling suits a model before any tuning: the base as it is and each untuned scaling, measured on the same
documents and passkeys. The samples are as large as the cost of a forward pass allows.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel
from rich.table import Table

from pi_lora.distributed import is_leader
from pi_lora.drawing import sparkline
from pi_lora.errors import ModelError
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.metrics import Metric
from pi_lora.evaluation.passkey.measurement import PasskeyScores
from pi_lora.evaluation.perplexity.measurement import PerplexityScores
from pi_lora.evaluation.registry import MEASUREMENTS, metrics_of
from pi_lora.evaluation.suite import SILENT, Display
from pi_lora.models.device import has_fast_bfloat16
from pi_lora.models.machine import hardware, versions
from pi_lora.models.model import Extension, Model
from pi_lora.planning.counting import shape_of
from pi_lora.planning.gpus import CPU, device_here
from pi_lora.planning.operations import flops_of_sequences
from pi_lora.planning.planning import ASSUMED_UTILIZATION
from pi_lora.recipe.evaluation import PasskeyOptions, PerplexityOptions, ProbeOptions
from pi_lora.recipe.places import cache_folder
from pi_lora.recipe.schema import Tuning
from pi_lora.report.comparison import Row, change_of
from pi_lora.report.pictures import comparison_picture
from pi_lora.scaling.config import Method, method_of, methods_for
from pi_lora.types import Json
from pi_lora.writing import check_can_write, read_json, write_json

DIRECT: Method = "direct"
# Scalings that are probed by default, of those that suit the model.
USUAL: tuple[Method, ...] = ("pi", "yarn", "theta")
# Seconds that a probe of one target may take, and FLOP/s of a GPU whose peak is not known.
SECONDS, SECONDS_ON_CPU, UNKNOWN_PEAK = 120, 900, 100e12
DEPTHS, MOST_TRIALS, MOST_DOCUMENTS = 8, 10, 12
# Where the sample is small, a scaling whose perplexity at L' is so many times the lowest is asked for no passkeys.
HOPELESS = 1.25
# No tuning is needed if perplexity is at most so many times the base's in its window, and so many passkeys are found.
KEPT, RETRIEVED = 1.05, 80.0


class Probed(BaseModel):
    """The scores of one scaling; `direct` is the base as it is. Without passkeys if none were asked."""

    perplexity: PerplexityScores
    passkey: PasskeyScores | None = None

    @property
    def inside(self) -> Metric:
        """The perplexity in the original window L."""
        return metrics_of(self.perplexity)[0]

    @property
    def beyond(self) -> Metric:
        """The perplexity in the target window L'."""
        return metrics_of(self.perplexity)[1]

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


class Probe(BaseModel):
    """A probed model, its original window (L, tokens), a `Reach` for each target, and what it was measured on."""

    model: str
    original: int
    hardware: str = ""
    versions: dict[str, str] = {}
    targets: list[Reach]

    def to_tune(self, target: int) -> tuple[Method, str] | tuple[None, None]:
        """Return the best scaling that is tuned for more than comparison, if it is the best of all, and its summary."""
        reach = self.at(target)
        return (None, None) if reach.best in ("direct", "dynamic") else (reach.best, reach.summary)

    def at(self, target: int) -> Reach:
        """Return what was found at a target; raise ModelError if it was not probed."""
        if found := next((reach for reach in self.targets if reach.target == target), None):
            return found
        known = ", ".join(str(reach.target) for reach in self.targets)
        raise ModelError(f"--probe: was made for --target {known}, not for {target}; probe again")


def probe(
    base: Model,
    targets: Sequence[int],
    options: ProbeOptions,
    *,
    json: Path | None = None,
    plot: Path | None = None,
    dtype: str | None = None,
    display: Display = SILENT,
) -> Probe:
    """Measure a plain base as it is and under each scaling, untuned, at each target; all in the same arithmetic.

    What was measured is kept until the end, so that an interrupted probe continues. The result is also kept in the
    cache, where `pi-lora train` reads it. Raise ScalingError if a scaling does not suit the model, ModelError if it is
    a run, DataError if a file cannot be written or no document is long enough.
    """
    if base.adapter:
        raise ModelError(f"{base.name}: brings its own scaling; probe its base, {base.base}")
    check_can_write(json, plot)
    usual = [method for method in methods_for(base.config) if method in (*USUAL, method_of(base.config))]
    chosen = cast("Sequence[Method]", options.scalings) or usual
    extended = [
        {method: base.extended(Extension(target, scaling=method)) for method in chosen if method != DIRECT}
        for target in sorted(targets)
    ]
    dtype = dtype or ("bfloat16" if has_fast_bfloat16() else None)
    with Session(say=display.say, shared=True) as session:
        reaches = [
            _reach(base, target, {DIRECT: base, **models}, options, dtype, display, session)
            for target, models in zip(sorted(targets), extended, strict=True)
        ]
        about: Json = {"hardware": hardware(), "versions": versions()}
        found = Probe(model=base.name, original=base.window, targets=reaches, **about)
        for reach in reaches if is_leader() else ():
            write_json(_kept_file(base.name, reach.target), reach.model_dump(include={"best", "summary"}))
        if json and is_leader():
            write_json(json, found.model_dump(mode="json", by_alias=True, exclude_unset=True))
    if plot and is_leader():
        panels = [curves for reach in reaches for curves in _curves(reach)]
        comparison_picture(panels, base.window, plot)
    return found


def read_probe(file: Path) -> Probe:
    """Read what `probe` has written; raise ModelError if the file holds something else."""
    return read_json(file, Probe, "probe again")


def probe_table(found: Probe, reach: Reach) -> Table:
    """Return a row for each scaling: perplexity in the original and the target window, beside that of the base in its
    window, loss by position as a picture, passkeys.
    """
    base = reach.scalings[DIRECT].inside
    table = Table(title=f"{found.model} to {reach.target:,} tokens, without tuning")
    for heading in ("scaling", f"perplexity at {found.original:,}", f"perplexity at {reach.target:,}"):
        table.add_column(heading)
    table.add_column("loss by position", no_wrap=True)
    table.add_column("passkeys")
    table.add_column("k_max", justify="right")
    positions = {name: each.perplexity.by_position for name, each in reach.scalings.items()}
    losses = {name: [part.loss for part in each.bins] for name, each in positions.items() if each}
    every_loss = [loss for curve in losses.values() for loss in curve]
    for name, each in reach.scalings.items():
        changes = [change_of(base, metric) for metric in (each.inside, each.beyond)]
        cells = [_with_change(row) if (name, row.run) != (DIRECT, base.value) else f"{row.run:.2f}" for row in changes]
        keys = (
            [each.retrieved.text, f"{each.passkey.k_max:,}"] if each.passkey and each.retrieved else ["not asked", ""]
        )
        label = "direct (the base as it is)" if name == DIRECT else name
        table.add_row(label, *cells, sparkline(losses[name], min(every_loss), max(every_loss), 16), *keys)
    scores = next(each for each in reach.scalings.values() if each.passkey)
    about = [MEASUREMENTS[each.measurement].about([each]) for each in (scores.perplexity, scores.passkey) if each]
    table.caption = f"{'; '.join(about)}; {scores.perplexity.dtype}; changes and 95 % intervals beside the base's "
    table.caption += f"{base.value:.2f} at {found.original:,}"
    return table


def next_command(found: Probe, reach: Reach, json: Path | None) -> str:
    """Return the command that makes the extended model: without tuning if that is enough, else a recipe."""
    model, target = [found.model, "--target", str(reach.target)], ["--probe", str(json)] if json else []
    if not reach.enough:
        return shlex.join(["pi-lora", "new", *model, *target])
    folder = f"models/{Path(found.model.rpartition(':')[2]).name}_{reach.best}_{reach.target}"
    return shlex.join(["pi-lora", "extend", *model, "--scaling", reach.best, "--output", folder, *target])


def better_scaling(model: str, target: int, scaling: str) -> str | None:
    """Return a line if the last probe of this model found another scaling better than the one of a recipe."""
    file = _kept_file(model, target)
    if not file.is_file() or (kept := read_json(file, Json, "probe again"))["best"] == scaling:
        return None
    return f"scaling: {scaling}: in a probe, {kept['summary']}; scaling={kept['best']} tunes from there"


def _kept_file(model: str, target: int) -> Path:
    """Return the file of the cache that holds the best scaling by the last probe of a model at a target."""
    place = Path(model).resolve() if Path(model).exists() else Path(model.replace("/", "--"))
    return cache_folder() / "probes" / f"{'--'.join(place.parts[-2:])}-{target}.json"


def _reach(
    base: Model,
    target: int,
    models: Mapping[Method, Model],
    options: ProbeOptions,
    dtype: str | None,
    display: Display,
    session: Session,
) -> Reach:
    passes = _affordable_passes(base, target) / len(models)
    few = passes < DEPTHS
    losses_of = PerplexityOptions(
        data=options.data,
        windows=(base.window, target),
        stride=base.window,
        truncate=target,
        documents=options.documents or min(MOST_DOCUMENTS, max(1, round(passes / 4))),
        by_position=True,
    )
    trials = options.trials or min(MOST_TRIALS, max(1, round(passes / (2 * DEPTHS))))
    keys_of = PasskeyOptions(target=target, depths=DEPTHS, trials=trials, seed=options.seed)
    display.say(f"{target:,} tokens: {losses_of.documents} documents, {DEPTHS * trials} passkeys for each scaling")

    def measured(name: str, asked: Any, scaling: Method) -> Json:
        with display.working(f"loading {base.name} under {scaling}"):
            loaded = models[scaling].load(dtype)
        with display.progress(f"{scaling}, {name} at {target:,}") as session.progress:
            return {name: MEASUREMENTS[name].run(loaded, asked, session)}

    scalings = {scaling: Probed(**measured("perplexity", losses_of, scaling)) for scaling in models}
    lowest = min(each.beyond.value for each in scalings.values())
    for scaling, each in scalings.items():
        if not few or each.beyond.value <= HOPELESS * lowest:
            scalings[scaling] = each.model_copy(update=measured("passkey", keys_of, scaling))
    best = _best(scalings)
    enough, summary = _verdict(scalings[DIRECT].inside, best, scalings[best])
    return Reach(target=target, best=best, enough=enough, summary=summary, scalings=scalings)


def _affordable_passes(base: Model, target: int) -> float:
    """Return how many forward passes over the target window a probe may make on this machine, by the plan."""
    device = device_here()
    on_cpu = device.name == CPU
    speed = (device.peak or UNKNOWN_PEAK) * ASSUMED_UTILIZATION[CPU if on_cpu else "full"]
    one_pass = flops_of_sequences(shape_of(base.skeleton), Tuning(method="full"), target, recomputed=0).forward
    return (SECONDS_ON_CPU if on_cpu else SECONDS) * speed / one_pass


def _best(scalings: Mapping[Method, Probed]) -> Method:
    shares = {name: each.retrieved for name, each in scalings.items() if each.retrieved}
    most = max(share.value for share in shares.values())
    among = [name for name, share in shares.items() if share.interval and share.interval[1] >= most]
    return min(among, key=lambda name: scalings[name].beyond.value)


def _verdict(base: Metric, best: Method, probed: Probed) -> tuple[bool, str]:
    """Return whether a scaling needs no tuning, and what it keeps and finds without."""
    keys = probed.retrieved
    assert keys, "the best is asked for passkeys"
    kept = max(probed.inside.value, probed.beyond.value) <= KEPT * base.value
    found = f"finds {keys.value:.0f} % of {keys.samples} passkeys without tuning"
    keeps = f"{best} keeps {probed.beyond.value:.2f} at {probed.beyond.at:,} ({base.value:.2f} at {base.at:,} before)"
    return kept and keys.value >= RETRIEVED, f"{keeps} and {found}"


def _with_change(row: Row) -> str:
    return f"{row.run:.2f}, {row.verdict}"


def _curves(reach: Reach) -> list[Mapping[str, Scores]]:
    """Return the panels of a target: loss by position, and passkeys by distance."""
    return [
        {name: each.perplexity for name, each in reach.scalings.items()},
        {name: each.passkey for name, each in reach.scalings.items() if each.passkey},
    ]
