"""The interface of measurements: options and a model in, typed scores out. The metrics of the scores are shown in the
terminal's table, on the model card, on the hub, and where a run is compared with its base. A journal keeps the results
so far, so that an interrupted measurement continues where it stopped.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, field_validator

from pi_lora.data.documents import fingerprint
from pi_lora.distributed import all_gather_objects, is_main_process, rank, shard, wait_for_all_processes
from pi_lora.drawing import Panel
from pi_lora.errors import Interrupted
from pi_lora.evaluation.duration import SHORT, Clock, Pass, clock_of, duration_in_words
from pi_lora.evaluation.forward import is_sharded
from pi_lora.evaluation.intervals import Interval, of_means, wilson
from pi_lora.models.device import versions
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.source import ModelSource
from pi_lora.recipe.evaluation import PromptOptions
from pi_lora.recipe.schema import Recipe
from pi_lora.recipe.section import Section
from pi_lora.scaling.scalings import Method
from pi_lora.storage import cache_folder, digest_of, read_json_lines
from pi_lora.types import Json, Progress, silent


class Value(NamedTuple):
    """The value of one document, trial or example.

    Attributes:
        name: The same name for every model.
        value: The outcome or the score.
        weight: The weight in the mean, such as the number of tokens.
        group: The sample that the value was drawn from, such as a task.
    """

    name: str
    value: float
    weight: float = 1.0
    group: str = ""


@dataclass(frozen=True)
class Metric:
    """A number that a measurement gives.

    Attributes:
        label: The name in tables.
        value: The number; of known `values` the weighted mean.
        unit: Such as `%` or `tokens`.
        higher_is_better: Whether an increase is an improvement.
        at: The window, distance or length of context in tokens, if any.
        digits: Digits after the point.
        interval: The 95 % interval.
        values: The values of single documents, trials or examples.
        is_ratio: Whether the value is a geometric mean, so that two models differ by a ratio.
        dataset: The data set on the hub.
        hub_name: The metric on the hub; details, which only the terminal shows, have none.
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
    def heading(self) -> str:
        """The label, with the tokens that the metric belongs to."""
        return self.label if self.at is None else f"{self.label} at {self.at:,}"

    @property
    def text(self) -> str:
        """The value with its unit and its interval."""
        text = f"{self.value:,.{self.digits}f}"
        if self.unit:
            text += f" {self.unit}"
        if self.interval:
            low, high = self.interval
            text += f" ({low:,.{self.digits}f} to {high:,.{self.digits}f})"
        return text

    @property
    def by_name(self) -> dict[str, Value]:
        """The values by name."""
        return {value.name: value for value in self.values}

    def compares_with(self, other: "Metric") -> bool:
        """Whether the change from another metric is meaningful: both have values of the same names, or no values; a
        share or mean is compared if one of them has none.
        """
        if self.is_ratio or (self.values and other.values):
            return self.by_name.keys() == other.by_name.keys()
        return True

    def change_from(self, before: "Metric") -> Interval | None:
        """Return the interval of the difference to the same metric of another model, from both intervals (Newcombe
        1998, method 10); None without both intervals.
        """
        if before.interval is None or self.interval is None:
            return None
        low, high = self.interval
        low_before, high_before = before.interval
        change = self.value - before.value
        down = math.hypot(self.value - low, high_before - before.value)
        up = math.hypot(high - self.value, before.value - low_before)
        return change - down, change + up


def proportion(label: str, mean: float, samples: int, **fields: Any) -> Metric:
    """Return a share of `samples` as a metric in percent with its Wilson interval, and the other `fields` of the
    metric. A thousand samples or more get a digit after the point. For values between 0 and 1, or from several groups,
    the interval is conservative.
    """
    low, high = wilson(mean, samples)
    return Metric(
        label=label,
        value=100 * mean,
        unit="%",
        digits=1 if samples >= 1000 else 0,
        interval=(100 * low, 100 * high),
        **fields,
    )


def average(label: str, mean: float, values: Sequence[Value], **fields: Any) -> Metric:
    """Return the mean of some values as a metric, with the interval by Student's t and the other `fields`."""
    pairs = [(0.0, value.value, value.weight) for value in values]
    return Metric(label=label, value=mean, interval=of_means([pairs]), values=values, **fields)


def longest_passing(scores: Mapping[int, float], threshold: float) -> int:
    """Return the greatest length in tokens such that it and all shorter ones reach the threshold; 0 if none does.

    >>> longest_passing({2048: 0.9, 4096: 0.7, 8192: 0.8}, 0.75)
    2048
    """
    return max(takewhile(lambda length: scores[length] >= threshold, sorted(scores)), default=0)


class Result(BaseModel):
    """A part of a result. Only fields that were set are written; fields of other versions are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class Scores(Result):
    """The results of one measurement of a model: the fields of the header, the step of a model that trains, whether
    the model is tuned on what is measured, and the prepared options, which measure another model in the same way.
    """

    measurement: ClassVar[str]

    model: str
    scale: float = 1.0
    scaling: Method | None = None
    dtype: str | None = None
    kernel: str | None = None
    window: int | None = None
    versions: dict[str, str] = {}
    step: int | None = None
    tuned_on: bool = False
    options: Any

    @field_validator("options", mode="before")
    @classmethod
    def _with_chat(cls, options: Any) -> Any:
        """Return options with `chat`: files before December 2026 leave it out, and are of raw prompts."""
        kind: Any = cls.model_fields["options"].annotation
        is_asked = issubclass(kind, PromptOptions)
        return {"chat": False, **options} if is_asked and isinstance(options, dict) else options

    @property
    def scale_text(self) -> str:
        """The scale and how it is reached, as far as the scores say it: `2 (yarn)`."""
        text = f"{self.scale:g}"
        return f"{text} ({self.scaling})" if self.scaling else text


# The libraries whose versions are kept with scores.
COMPUTING = ("pi-lora", "torch", "transformers", "peft")
# Suffixes of the files in a model's folder that reports write, and that change no number.
REPORT_SUFFIXES = (".md", ".html", ".png")


@dataclass
class Session:
    """A measurement in progress. The context turns Ctrl-C into Interrupted.

    A journal keeps the results until the context ends without an error; after an error the same command continues from
    there. It is a folder named after the hash of all that decides the results, with one file per process. Each result
    is a line; a truncated line is measured again.

    Attributes:
        progress: Called after each result.
        say: Prints messages to the user.
        remedy: How a measurement takes less time, with the `measurement`, a `key` of the options and a `value`.
        journalled: Whether the session keeps a journal. A model that trains has none: no file tells its steps apart.
        folders: The journals of this session.
    """

    progress: Progress = silent
    say: Callable[[str], object] = str
    remedy: str = "--{key} {value} shortens it"
    journalled: bool = False
    folders: list[Path] = field(default_factory=list)

    def journal(self, loaded: LoadedModel, decided_by: Mapping[str, Any]) -> Path | None:
        """Return the folder of the journal for the results that a model and `decided_by`, JSON, determine; None without
        a journal.
        """
        if not self.journalled:
            return None
        key = digest_of({**decided_by, "model": identity_of(loaded)})
        folder = cache_folder() / "evaluations" / key
        self.folders.append(folder)
        return folder

    def map_items(
        self,
        loaded: LoadedModel,
        options: Section,
        decided_by: Mapping[str, Any],
        *,
        items: Sequence[Any],
        function: Callable[[Any], Any],
        about: "About",
        passes: Callable[[Any], Iterable[Pass]] | None = None,
    ) -> list[Any]:
        """Return the results, JSON, of `items`, texts or numbers, which the model, the options and `decided_by`, JSON,
        determine. Each process measures its share without the results in the journal, and all processes return the
        same. The `passes` of the items, or else the first item, tell how long it takes.

        With a sharded model every process measures all items: a forward pass gathers the weights from all processes, so
        all must run the same passes.
        """
        folder = self.journal(loaded, {**options.model_dump(), **decided_by})
        results = dict(read_journal(folder)) if folder else {}
        is_divided = not is_sharded(loaded.module)
        items_of_rank = shard(items) if is_divided else items
        clock = clock_of(loaded)
        left = {item: clock.work(passes(item)) if passes else 1.0 for item in items_of_rank if item not in results}
        is_known = passes is not None and self.announce(clock, about, sum(left.values()))
        for done, item in enumerate(items_of_rank, 1):
            if item not in results:
                begin = time.monotonic()
                results[item] = function(item)
                if not is_known and left[item]:
                    speed = left[item] / (time.monotonic() - begin)
                    is_known = self.announce(clock._replace(speed=speed), about, sum(left.values()))
                if folder:
                    append_journal(item, results[item], folder)
                self.progress(done, len(items_of_rank), "")
        if is_divided:
            results = dict(all_gather_objects(list(results.items())))
        return [results[item] for item in items]

    def announce(self, clock: Clock, about: "About", work: float) -> bool:
        """Say how long the `work` of a measurement takes, and what shortens it; return False if no speed is known."""
        if not clock.speed:
            return False
        seconds = work / clock.speed
        if seconds >= SHORT:
            line = f"{about.measurement}: {about.amount}: {duration_in_words(seconds)}"
            key, value = about.less
            if value:
                remedy = self.remedy.format(measurement=about.measurement, key=key, value=value)
                line += f"; {remedy}"
            self.say(line)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None and self.folders:
            wait_for_all_processes()  # until here another process may read a journal
            if is_main_process():
                for folder in self.folders:
                    shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt) and any(folder.exists() for folder in self.folders):
            raise Interrupted("interrupted; what was measured is kept, the same command goes on from there") from None


class About(NamedTuple):
    """The amount that a measurement reads, for the line about its duration.

    Attributes:
        measurement: The name of the measurement.
        amount: Such as `20 documents at 4 windows`.
        less: An option, and a value with which the measurement takes less time; 0 if no option shortens it.
    """

    measurement: str
    amount: str
    less: tuple[str, int]


def read_journal(folder: Path) -> Iterator[tuple[str | int, Any]]:
    """Yield the items and results in a journal, without damaged lines."""
    for file in sorted(folder.glob("*.jsonl")):
        yield from read_json_lines(file)


def append_journal(item: str | int, result: Any, folder: Path) -> None:
    """Write a result to a journal; a full disk ends no measurement."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{rank()}-{os.getpid()}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([item, result]) + "\n")


def header_of(loaded: LoadedModel, window: int | None = None) -> Json:
    """Return the fields of scores that describe a loaded model, measured at `window`, by default the model's own: name,
    scale L'/L, scaling, dtype, attention kernel, window in tokens, versions of the libraries that compute.
    """
    dtype = loaded.dtype
    if loaded.autocast:
        dtype += ", computed in bfloat16"
    return {
        "model": loaded.name,
        "scale": loaded.scale,
        "scaling": loaded.source.scaling,
        "dtype": dtype,
        "kernel": loaded.kernel,
        "window": window or loaded.window,
        "versions": versions(COMPUTING),
    }


def identity_of(loaded: LoadedModel) -> Json:
    """Return as JSON all that decides a model's numbers: files, config, dtype, kernel, device and versions."""
    source = loaded.source
    files: list[Path] = []
    for folder in filter(None, (source.adapter, source.base.path)):
        files += [file for file in sorted(folder.iterdir()) if file.is_file() and file.suffix not in REPORT_SUFFIXES]
    return {
        **header_of(loaded),
        "files": fingerprint(files),
        "config": dict(source.config),
        "device": loaded.module.device.type,
        "versions": versions(),
    }


@dataclass(frozen=True)
class Preview:
    """A model before weights are read, for the checks of measurements.

    Attributes:
        window: The context window in tokens.
        tokenizer: The tokenizer; None if it cannot be read.
        original: L in tokens; 0 if it is not known.
        recipe: The recipe that the model is tuned by, for options that are not prepared yet.
        ask_hub: Whether texts on the hub are read.
        section: The section of a recipe that holds the options; empty if they are options of a command.
    """

    window: int
    tokenizer: Any = None
    original: int = 0
    recipe: Recipe | None = None
    ask_hub: bool = True
    section: str = ""

    def key(self, name: str) -> str:
        """Return an option as the user names it."""
        return f"{self.section}.{name}" if self.section else "--" + name.replace("_", "-")


OptionsT = TypeVar("OptionsT", bound=Section)
ScoresT = TypeVar("ScoresT", bound=Scores)


class Measurement(Protocol[OptionsT, ScoresT]):
    """A measurement of a model: `options` in, `scores` out. The name `scores.measurement` is also the section of a
    recipe, the command, and the file in a run's scores.

    To add a measurement, write a module with the scores and a class like this, the options in
    `pi_lora.recipe.evaluation`, and one line in `pi_lora.evaluation.suite`.
    """

    options: type[OptionsT]
    scores: type[ScoresT]

    def prepare(self, options: OptionsT, models: Sequence[ModelSource]) -> OptionsT:
        """Fill in the defaults that depend on the models, so that all models are measured alike."""
        return options

    def problems(self, options: OptionsT, preview: Preview) -> Iterable[str]:
        """Return what keeps a model from being measured, as far as it shows before weights are read, a line each."""
        return ()

    def check(self, options: OptionsT) -> None:
        """Raise PiLoraError before weights are read if examples cannot be read."""
        return

    def run(self, model: LoadedModel, options: OptionsT, session: Session) -> ScoresT:
        """Prepare the options, and return the scores of a model."""
        prepared = self.prepare(options, [model.source])
        return self.measure(model, prepared, session)

    def measure(self, model: LoadedModel, options: OptionsT, session: Session) -> ScoresT:
        """Return the scores of a model, measured with prepared options."""

    def metrics(self, scores: ScoresT) -> Iterable[Metric]:
        """Return the metrics in the order of the table."""

    def panels(self, scores: Mapping[str, ScoresT]) -> Iterable[Panel]:
        """Return functions that draw the scores of several models by label, one matplotlib axes each."""
        return []


def as_json(scores: Scores) -> Json:
    """Return scores as they are written to a file."""
    fields = scores.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return {"measurement": scores.measurement, **fields}
