"""What a measurement is: options and a model in, typed scores out, and the metrics in them that everything else shows:
the terminal's table, the model card, the hub, and the comparison of a run with its base. A journal keeps what was
measured so far, so that an interrupted measurement continues where it stopped.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict

from pi_lora.data.documents import fingerprint
from pi_lora.distributed import all_gather_objects, is_main_process, shard, wait_for_all_processes
from pi_lora.drawing import Panel
from pi_lora.errors import Interrupted
from pi_lora.evaluation.forward import is_sharded
from pi_lora.evaluation.intervals import Interval, of_means, wilson
from pi_lora.models.machine import versions
from pi_lora.models.model import Model
from pi_lora.recipe.section import Section
from pi_lora.storage import cache_folder
from pi_lora.types import Json, Progress, silent


class Value(NamedTuple):
    """The value of one document, trial or example, by a name that is the same for every model; its `weight` in the
    mean, such as its tokens; and the `group` that it was drawn from, such as a task.
    """

    name: str
    value: float
    weight: float = 1.0
    group: str = ""


@dataclass(frozen=True)
class Metric:
    """A number that a measurement gives.

    `at` is the window, distance or length of context in tokens that it belongs to, if any. `interval` is its 95 %
    interval. Where `values` are known, the value is their weighted mean, or if `is_ratio` their geometric mean, and two
    models differ by a ratio. `dataset` and `hub_name` are the words of the hub; a detail, which only the terminal
    shows, has none.
    """

    label: str
    value: float
    unit: str = ""
    higher_is_better: bool = True
    at: int | None = None
    digits: int = 0
    interval: Interval | None = None
    values: Sequence[Value] = ()
    is_ratio: bool = False
    dataset: str = ""
    hub_name: str = ""

    @property
    def is_detail(self) -> bool:
        """Whether the metric is left out of cards and comparisons."""
        return not self.hub_name

    @property
    def heading(self) -> str:
        """The label, with the tokens that the metric belongs to."""
        return self.label if self.at is None else f"{self.label} at {self.at:,}"

    @property
    def text(self) -> str:
        """The value with its unit and its interval."""
        unit = f" {self.unit}" if self.unit else ""
        bounds = "" if self.interval is None else " ({:,.{n}f} to {:,.{n}f})".format(*self.interval, n=self.digits)
        return f"{self.value:,.{self.digits}f}{unit}{bounds}"

    def compares_with(self, other: "Metric") -> bool:
        """Whether a ratio to another metric means something: both are of the same values, if these are known."""
        return not self.is_ratio or {each.name for each in self.values} == {each.name for each in other.values}

    def change_from(self, before: "Metric") -> Interval | None:
        """Return the interval of the difference to the same metric of another model, from both intervals (Newcombe
        1998, method 10); None if one of them has none.
        """
        if before.interval is None or self.interval is None:
            return None
        change = self.value - before.value
        down = math.hypot(self.value - self.interval[0], before.interval[1] - before.value)
        up = math.hypot(self.interval[1] - self.value, before.value - before.interval[0])
        return change - down, change + up


def proportion(label: str, mean: float, samples: int, **others: Any) -> Metric:
    """Return a share of so many samples as a metric in percent, with its Wilson interval; a digit after the point needs
    a thousand of them. Of values between 0 and 1, or from several groups, the interval is wider than need be, never too
    narrow.
    """
    low, high = (100 * bound for bound in wilson(mean, samples))
    digits = 1 if samples >= 1000 else 0
    return Metric(label, 100 * mean, "%", digits=digits, interval=(low, high), **others)


def average(label: str, mean: float, values: Sequence[Value], **others: Any) -> Metric:
    """Return the mean of some values as a metric, with its interval by Student's t."""
    interval = of_means([[(0.0, each.value, each.weight) for each in values]])
    return Metric(label, mean, values=values, interval=interval, **others)


def longest_passing(scores: Mapping[int, float], threshold: float) -> int:
    """Return the greatest length in tokens such that it and all shorter ones reach the threshold; 0 if none does.

    >>> longest_passing({2048: 0.9, 4096: 0.7, 8192: 0.8}, 0.75)
    2048
    """
    return max(takewhile(lambda length: scores[length] >= threshold, sorted(scores)), default=0)


class Result(BaseModel):
    """A part of a result; only fields that were set are written, and fields of other versions are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class Scores(Result):
    """What every result says of its model: name, scale L'/L, dtype, attention kernel, window in tokens, step; and the
    options it was measured with, complete, which measure another model in the same way.
    """

    measurement: ClassVar[str]

    model: str
    scale: float = 1.0
    dtype: str | None = None
    kernel: str | None = None
    window: int | None = None
    step: int | None = None
    options: Any


# Files of a model's folder that reports write, and that change no number.
WRITTEN_BY_REPORTS = (".md", ".html", ".png")


@dataclass
class Session:
    """A measurement in progress: `progress` is called as results come, `say` prints what a user should know. If
    `shared`, the processes of this run divide the work, and a journal keeps the results until the context ends without
    an error: the same command continues from there. Ctrl-C becomes Interrupted.

    A journal is a folder named after what decides the results. It has one file per process, and a line as soon as a
    result is known; what was cut off is measured again.
    """

    progress: Progress = silent
    say: Callable[[str], object] = str
    shared: bool = False
    folders: list[Path] = field(default_factory=list)

    def journal(self, loaded: Model, decided_by: Mapping[str, Any]) -> Path | None:
        """Return the folder for what is measured of a model; `decided_by` is JSON that, with the model, decides it. A
        model that trains has no files to tell it apart: nothing is kept of it.
        """
        if not self.shared or loaded.in_training:
            return None
        key = json.dumps({**decided_by, "model": identity_of(loaded)}, sort_keys=True)
        folder = cache_folder() / "evaluations" / hashlib.sha256(key.encode()).hexdigest()
        self.folders.append(folder)
        return folder

    def measure(
        self, loaded: Model, decided_by: Mapping[str, Any], names: Sequence[Any], measure: Callable[[Any], Any]
    ) -> list[Any]:
        """Return the results of `names`, which are texts or numbers; results are JSON. Each process measures what is
        left of its share, and all return the same. Every process measures all of a sharded model: its forward passes
        gather the weights from all processes, so all make the same ones.
        """
        folder = self.journal(loaded, decided_by)
        results = dict(read_journal(folder)) if folder else {}
        together = self.shared and not is_sharded(loaded.model)
        own = shard(names) if together else names
        for done, name in enumerate(own, 1):
            if name not in results:
                results[name] = measure(name)
                if folder:
                    append_journal(name, results[name], folder)
                self.progress(done, len(own))
        if together:
            results = dict(all_gather_objects([*results.items()]))
        return [results[name] for name in names]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None and self.folders:
            wait_for_all_processes()  # until here another process may read a journal
            for folder in self.folders if is_main_process() else ():
                shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt) and any(folder.exists() for folder in self.folders):
            raise Interrupted("interrupted; what was measured is kept, the same command goes on from there") from None


def read_journal(folder: Path) -> Iterator[tuple[str | int, Any]]:
    """Yield the names and results in a journal, without lines that are damaged."""
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            with suppress(ValueError):
                name, result = json.loads(line)
                yield name, result


def append_journal(name: str | int, result: Any, folder: Path) -> None:
    """Write a result to a journal; a full disk ends no measurement."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"{os.environ.get('RANK', '0')}-{os.getpid()}.jsonl"
        with own.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, result]) + "\n")


def described(loaded: Model) -> Json:
    """Return what every result says of a loaded model."""
    return {
        "model": loaded.name,
        "scale": loaded.scale,
        "dtype": loaded.dtype + ", computed in bfloat16" * loaded.autocast,
        "kernel": loaded.kernel,
        "window": loaded.window,
    }


def identity_of(loaded: Model) -> Json:
    """Return what decides the numbers that a model gives, as JSON: its files, config, dtype, kernel and versions."""
    folders = filter(None, (loaded.adapter, loaded.folder))
    files = [file for folder in folders for file in sorted(folder.iterdir()) if file.is_file()]
    return {
        **described(loaded),
        "files": fingerprint(file for file in files if file.suffix not in WRITTEN_BY_REPORTS),
        "config": dict(loaded.config),
        "device": loaded.model.device.type,
        "versions": versions(),
    }


OptionsT = TypeVar("OptionsT", bound=Section)
ScoresT = TypeVar("ScoresT", bound=Scores)


class Measurement(Protocol[OptionsT, ScoresT]):
    """A measurement: `scores` are its results, whose `measurement` names the section of a recipe, the command, and the
    file in a run's scores.

    A new one is a module with its scores and a class like this, its options in `pi_lora.recipe.evaluation`, and one
    line in `pi_lora.evaluation.suite`.
    """

    scores: type[ScoresT]

    def prepare(self, options: OptionsT, models: Sequence[Model]) -> OptionsT:
        """Return the options with defaults that depend on the models filled in, so that all are measured alike."""
        return options

    def check(self, options: OptionsT) -> None:
        """Raise PiLoraError for what shows before weights are read: a missing package, examples that cannot be read."""
        return

    def run(self, model: Model, options: OptionsT, session: Session) -> ScoresT:
        """Return the scores of a model; `options` need not be prepared."""
        options = self.prepare(options, [model])
        return self.scores(**{**described(model), "options": options, **self.measure(model, options, session)})

    def measure(self, model: Model, options: OptionsT, session: Session) -> Json:
        """Return the fields of the scores that hold what was measured, and how, of a model with prepared options."""

    def metrics(self, scores: ScoresT) -> list[Metric]:
        """Return the metrics in the order of the table."""

    def panels(self, scores: Mapping[str, ScoresT]) -> list[Panel]:
        """Return the functions that draw the scores of several models by label, each on matplotlib axes of its own."""
        return []


def as_json(scores: Scores) -> Json:
    """Return scores as they are written."""
    return {"measurement": scores.measurement, **scores.model_dump(mode="json", by_alias=True, exclude_unset=True)}
