"""Typed results of every measurement, with one writer and one reader of their JSON."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pi_lora.errors import DataError, ModelError
from pi_lora.types import Json
from pi_lora.writing import first_problem, read_json, write_json


class Result(BaseModel):
    """A part of a result; only fields that were set are written, and fields of later versions are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True)


class Scores(Result):
    """What every result says of its model: name, scale L'/L, dtype, attention kernel, window in tokens, step."""

    told_by: ClassVar[str]  # the key that only this kind of result has
    command: ClassVar[str]  # of `pi-lora eval`, that gives such results

    model: str
    scale: float = 1.0
    dtype: str | None = None
    kernel: str | None = None
    quantized_kernel: str | None = None
    window: int | None = None
    step: int | None = None


class WindowPerplexity(Result):
    """The perplexity at one window length (tokens) over `tokens` scored tokens, each weighted equally, and their loss
    in bits over the `bytes` of UTF-8 text that they stand for.
    """

    window: int
    perplexity: float
    tokens: int
    bits_per_byte: float | None = None
    bytes: int | None = None


class DocumentPerplexity(Result):
    """The perplexities of one document."""

    name: str
    tokens: int
    windows: list[WindowPerplexity]


class PositionLoss(Result):
    """The mean loss in nats of tokens with `first` to `last` - 1 tokens before them in their window."""

    first: int = Field(alias="from")
    last: int = Field(alias="to")
    loss: float
    tokens: int


class LossByPosition(Result):
    """The loss by position in windows of `window` tokens that do not overlap."""

    window: int
    bins: list[PositionLoss]


class PerplexityScores(Scores):
    """Sliding-window perplexity of `documents`, chosen and truncated as the other fields say."""

    told_by, command = "windows", "perplexity"

    data: str = ""
    documents: int | None = None
    documents_too_short: int | None = None
    min_tokens: int | None = None
    truncate: int | None = None
    seed: int | None = None
    bos: bool | None = None
    stride: int = 0
    weighting: str = "token"
    windows: list[WindowPerplexity]
    per_document: list[DocumentPerplexity] | None = None
    by_position: LossByPosition | None = None


class PasskeyDepth(Result):
    """The trials at one depth: `k` as asked for, `distance` as placed, in tokens from the key to the end."""

    k: int
    distance: int | None = None
    success_rate: float = Field(ge=0, le=1)
    trials: int
    outcomes: list[bool] | None = None


class PasskeyScores(Scores):
    """Passkey retrieval over `target` tokens of context; `k_max` in tokens, depths from the nearest."""

    told_by, command = "k_max", "passkey"

    seed: int = 0
    decoding: str = "greedy"
    k_max_only: bool = False
    target: int
    k_max: int
    depths: list[PasskeyDepth]
    left_out: Json | None = None


class PasskeyMap(Scores):
    """Passkey retrieval over several `lengths` of context, the shortest first, with as many depths at each."""

    told_by, command = "lengths", "passkey"

    seed: int = 0
    lengths: list[PasskeyScores] = Field(min_length=1)

    @model_validator(mode="after")
    def _alike(self) -> Self:
        if {len(each.depths) for each in self.lengths} != {len(self.lengths[0].depths) or 1}:
            raise ValueError("lengths: have not the same number of depths each, one at least")
        return self


class TaskScore(Result):
    """Accuracy over `examples` (`stderr` None for one) and of each, or the `metrics` that lm-eval reports of others."""

    acc: float | None = None
    stderr: float | None = None
    examples: int = 0
    shots: int | None = None
    truncated_inputs: int | None = None
    acc_norm: float | None = None
    outcomes: list[float] | None = None
    metrics: dict[str, float] | None = None


class BenchmarkScores(Scores):
    """Short-context benchmarks by task, as lm-eval scores them."""

    told_by, command = "tasks", "benchmarks"

    metric: str | None = None
    lm_eval: str | None = None
    limit: int | None = None
    batch_size: int | None = None
    data: dict[str, str] | None = None
    tasks: dict[str, TaskScore]


class RulerTask(Result):
    """A task of RULER at one window: the mean of `outcomes`, the share of answers found in each of the prompts made for
    `length` tokens; `tokens` is the longest with what is written after it.
    """

    score: float = Field(ge=0, le=1)
    stderr: float | None = None
    samples: int
    length: int
    tokens: int
    outcomes: list[float] | None = None


class RulerWindow(Result):
    """The mean over the tasks of RULER at one window (tokens)."""

    window: int
    score: float = Field(ge=0, le=1)
    stderr: float | None = None
    tasks: dict[str, RulerTask]


class RelativeLength(Result):
    """The effective length in tokens by 95 % of `score`, the base's at `window`, the longest measured of its own."""

    base: str
    window: int
    score: float
    effective_length: int


class RulerScores(Scores):
    """RULER at several windows, and its effective length in tokens: up to it every mean reaches the paper's 85.6 %."""

    told_by, command = "effective_length", "ruler"

    seed: int = 0
    samples: int = 0
    chat_template: bool = False
    batch_size: int | None = None
    lm_eval: str | None = None
    left_out: dict[str, str] | None = None
    lengths: list[RulerWindow] = Field(min_length=1)
    effective_length: int
    relative: RelativeLength | None = None


class SummarizationScores(Scores):
    """ROUGE F1 in percent over `examples` with 95 % intervals, and how the summaries were prompted and sampled."""

    told_by, command = "rougeL", "summarization"

    engine: str | None = None
    data: Json | str = ""
    task: Json | None = None
    sampling: Json = {}
    metric: str = ""
    examples: int = 0
    left_out: Json | None = None
    documents_cut: int | None = None
    ended: int | None = None
    predictions: str | None = None
    rouge1: float
    rouge2: float
    rougeL: float
    geometric_mean: float | None = None
    intervals: dict[str, tuple[float, float]] | None = None


# No count, score or loss is larger.
MOST = 1e15
KINDS: tuple[type[Scores], ...] = (
    PerplexityScores,
    RulerScores,  # which has `lengths` as well
    PasskeyMap,
    PasskeyScores,
    BenchmarkScores,
    SummarizationScores,
)


def options_of(scores: Scores) -> Json:
    """Return the options of `pi-lora eval` that measure another model as `scores` were made, lists as tuples, or as
    lists if the option is repeated; none of summaries. Files that are gone are left out.
    """
    match scores:
        case PerplexityScores(windows=windows):
            chosen = {key: getattr(scores, key) for key in ("stride", "documents", "min_tokens", "truncate", "seed")}
            return {"data": scores.data, "windows": tuple(row.window for row in windows), **chosen}
        case PasskeyScores(target=target, depths=depths):
            trials = max((depth.trials for depth in depths), default=None)
            return {"target": target, "depths": len(depths), "trials": trials, "seed": scores.seed}
        case PasskeyMap(lengths=lengths):
            grid = {key: value for key, value in options_of(lengths[0]).items() if key != "target"}
            return {"targets": tuple(each.target for each in lengths), **grid, "seed": scores.seed}
        case BenchmarkScores(limit=limit, batch_size=size, window=window):
            data = [f"{name}={place}" for name, place in (scores.data or {}).items() if Path(place).exists()]
            return {"tasks": tuple(scores.tasks), "data": data, "limit": limit, "batch_size": size, "window": window}
        case RulerScores(lengths=windows_):
            names = {"windows": tuple(each.window for each in windows_), "tasks": tuple(windows_[0].tasks)}
            return names | {key: getattr(scores, key) for key in ("samples", "seed", "batch_size", "chat_template")}
    return {}


def read_scores(file: Path) -> Scores | None:
    """Return the result in a file, or None if it holds none; raise ModelError if it is no JSON or a field is wrong."""
    again = "measure again or remove it"
    content: Any = read_json(file, object, again)
    kind = next((kind for kind in KINDS if isinstance(content, dict) and kind.told_by in content), None)
    if kind and not all(abs(number) <= MOST for number in _numbers(content)):
        raise ModelError(f"{file}: has a number that is infinite, NaN or more than {MOST:.0e}; {again}")
    try:
        return kind.model_validate(content) if kind else None
    except ValidationError as error:
        raise ModelError(f"{file}: {first_problem(error)}; {again}") from None


def _numbers(content: Any) -> Iterator[float]:
    if isinstance(content, int | float):
        yield content
    elif isinstance(content, dict | list):
        for each in content.values() if isinstance(content, dict) else content:
            yield from _numbers(each)


def as_json(result: BaseModel) -> Json:
    """Return a result as it is written."""
    return result.model_dump(mode="json", by_alias=True, exclude_unset=True)


def write_scores(scores: Scores | Sequence[Scores], file: Path) -> None:
    """Write a result, or those of several models as a list; raise DataError if the file cannot be written."""
    each = [as_json(one) for one in ([scores] if isinstance(scores, Scores) else scores)]
    write_json(file, each if len(each) > 1 else each[0])


def check_can_write(*files: Path | None) -> None:
    """Raise DataError if one of `files` cannot be written, before hours are spent on what it is to hold."""
    for file in filter(None, files):
        with _written_whole(file) as part:
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            part.touch()
            part.unlink(missing_ok=True)


@contextmanager
def _written_whole(file: Path) -> Iterator[Path]:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield file.with_name(f".{file.name}.partial")
    except (OSError, ValueError) as error:  # with_name refuses a name that is none
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{file}: cannot be written ({reason}); choose another file") from None
