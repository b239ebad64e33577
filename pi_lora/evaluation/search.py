"""Search for divisors of the rotary frequencies by measuring, without tuning (LongRoPE2, Shang et al. 2025, arXiv
2502.20082).

LongRoPE2 searches the divisors by an evolution that is scored with the perplexity of needles. Here every forward pass
asks many needles one after the other, and plain text is scored as well:

- the loss of the needles: numbers that were stated at all depths of a text, and are asked for at the end;
- the loss of text in both windows, times `PENALTY`.

The scores are differentiable in the divisors. So the search is a descent along the gradient, where an evolution has to
try. It begins with YaRN (with theta, if YaRN does not suit the model), and keeps YaRN's factor of the attention, which
short texts would choose too low. No dimension is taken as critical; no frequency is divided by less than a higher one.
A step reads a short text with new needles, whose chunks are spread over the target window, as in PoSE, and a short text
without needles as it is. Now and then the mean of the last half of the steps reads the target window; the best of these
means is the result. The search ends early if the loss of the needles stays as it is.
"""

import inspect
import math
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from pi_lora.errors import DataError, ModelError, ScalingError
from pi_lora.evaluation.exams import Exam, Exams
from pi_lora.evaluation.forward import check_numbers, token_losses
from pi_lora.evaluation.measurement import Session, append_journal, read_journal
from pi_lora.evaluation.texts import choose_documents, complete
from pi_lora.models.device import hardware, has_fast_bfloat16, versions
from pi_lora.models.loaded import load_model
from pi_lora.models.source import ModelSource
from pi_lora.models.weights import finite
from pi_lora.recipe.evaluation import SearchOptions, TextOptions
from pi_lora.scaling.extension import Extension, extend_config
from pi_lora.scaling.rope import Rope
from pi_lora.scaling.scalings import Method
from pi_lora.storage import check_can_write, write_json
from pi_lora.types import Progress, ui

# The most documents that a search reads, besides those that are left for the test, and the most tokens of a document.
DOCUMENTS = 16
DOCUMENT_TOKENS = 2**19
# The largest divisor: a frequency turns by at most a thousandth of a radian in a million tokens.
LARGEST = 1e9
# A nat that the text loses costs as much as this many nats of a needle.
PENALTY = 4.0
# Adam's learning rate for the logarithms of the divisors, the steps after which it has fallen by a half, and the decay
# rates of the moments.
RATE = 0.03
STEPS_TO_HALF = 16
BETAS = (0.8, 0.95)
# Steps before a mean reads the target window: this number, or more where reading takes over a third of the time.
LEAST_STEPS = 8
SHORT_SHARE = 2
# The search ends if this number of means in a row, the start among them, lose about the same on the needles: the
# highest loss is less than this share above the lowest.
PATIENCE = 5
LEAST_MOVE = 0.01
# The frequencies of the layers that attend to the whole window, in a rotary module for all layers or by layer type.
FREQUENCIES = ("inv_freq", "full_attention_inv_freq")


class Scored(BaseModel):
    """The losses of divisors in nats, of the needles and of the text. `value` is what the search minimizes, `point` are
    the logarithms of the divisors.
    """

    needles: float
    text: float
    value: float
    point: Annotated[tuple[float, ...], Field(exclude=True)] = ()


class SearchResult(BaseModel):
    """The best divisors, and the scores of the first and of the best."""

    model: str
    original: int
    target: int
    factors: tuple[float, ...]
    attention_factor: float
    options: SearchOptions
    steps: int
    test_documents: int
    scores: dict[str, Scored]
    hardware: str
    versions: dict[str, str]


class Searched:
    """A loaded base whose rotary frequencies are divided, and the texts that score the divisors."""

    def __init__(self, base: ModelSource, options: SearchOptions) -> None:
        self.base = base
        self.attention_factor = start_rope(base, options.target).attention_factor
        self.loaded = load_model(base, base.dtype or ("bfloat16" if has_fast_bfloat16() else None))
        text_options = complete(TextOptions(data=options.data, column=options.column), [base])
        most = options.documents + DOCUMENTS
        # Some default choices cut documents, perhaps below the target window.
        text_options = text_options.changed(
            documents=min(most, text_options.documents or most),
            truncate=max(DOCUMENT_TOKENS, options.target),
        )
        # The first documents are left for the test.
        documents, _ = choose_documents(self.loaded, text_options, options.target)
        self.test_documents = min(options.documents, len(documents) - 1)
        tested = {document.digest for document in documents[: self.test_documents]}
        self.texts = [document for document in documents if document.digest not in tested]
        if not self.texts or not self.test_documents:
            text = text_options.data
            raise DataError(
                f"--data: {text}: the search and its test need two different documents of {options.target} tokens; "
                "name more texts, or choose a shorter --target"
            )
        self.exams = Exams(
            self.loaded,
            [text.ids for text in self.texts],
            options.target,
            options.seed,
        )
        self.long = self.exams.long()
        self.text = self.exams.row(self.texts[-1].ids[: options.target].tolist())
        # Half of the original window or more before a token.
        self.scored = range(base.rope.trained // 2, options.target)
        self.rotary = [
            (part, name, plain.clone())
            for part in self.loaded.module.modules()
            for name, plain in part.named_buffers(recurse=False)
            if name in FREQUENCIES
        ]
        self.loaded.module.requires_grad_(requires_grad=False)
        for part, _, _ in self.rotary:
            part.register_forward_hook(_with_gradient, with_kwargs=True)
        if self.loaded.module.device.type != "cpu":
            checkpoint_layers(self.loaded.module)

    def use(self, logarithms: torch.Tensor, attention_factor: float) -> None:
        """Divide the rotary frequencies by divisors with these logarithms, and set the factor of the attention."""
        for part, name, plain in self.rotary:
            setattr(part, name, plain / logarithms.exp().to(plain))
            setattr(part, name.replace("inv_freq", "attention_scaling"), attention_factor)

    def losses(
        self, logarithms: torch.Tensor, ids: torch.Tensor, scored: Sequence[int], **inputs: torch.Tensor
    ) -> torch.Tensor:
        """Return the losses in nats of the scored tokens of `ids` (1, tokens): (scored), on the CPU."""
        self.use(logarithms, self.attention_factor)
        losses = token_losses(self.loaded.module, ids, scored, **inputs)[0]
        check_numbers(self.loaded, finite(losses))
        return losses

    def needle_loss(self, logarithms: torch.Tensor, exam: Exam) -> torch.Tensor:
        """Return the mean loss of the answers."""
        return self.losses(logarithms, exam.ids, exam.answers, **exam.inputs).mean()

    def text_loss(self, logarithms: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the scored tokens of the text of L' tokens."""
        return self.losses(logarithms, self.text, self.scored).mean()

    def gradient(self, logarithms: torch.Tensor, exam: Exam, text: torch.Tensor) -> torch.Tensor:
        """Return the gradient of what the answers and a text lose, in the logarithms: (divisors)."""
        point = logarithms.clone().requires_grad_()
        tokens = text.shape[1]
        # The gradients one after the other, so that the graph of one text is in memory.
        [of_needles] = torch.autograd.grad(self.needle_loss(point, exam), point)
        text_losses = self.losses(point, text, range(tokens // 4, tokens))
        [of_text] = torch.autograd.grad(text_losses.mean(), point)
        return of_needles + PENALTY * of_text


def checkpoint_layers(model: Any) -> None:
    """Let the layers of a model compute their activations again for a gradient, instead of keeping them."""
    for part in model.modules():
        if isinstance(part, GradientCheckpointingLayer):
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)


def _with_gradient(part: Any, args: Any, inputs: Any, output: Any) -> Any:
    """Compute the cosines and sines again with a gradient, without the decorators that transformers puts around it."""
    if not torch.is_grad_enabled():
        return output
    return inspect.unwrap(type(part).forward)(part, *args, **inputs)


def probe_command(result: SearchResult, file: Path) -> str:
    """Return the command that compares the result in `file` with untuned scalings, on documents that the search did not
    read and with other passkeys.
    """
    options = {
        "--target": result.target,
        "--factors": file,
        "--data": result.options.data,
        "--column": result.options.column,
        "--documents": result.test_documents,
        "--seed": result.options.seed + 1,
        "--json": file.with_suffix(".probe.json"),
    }
    given = [word for option, value in options.items() if value is not None for word in (option, str(value))]
    return shlex.join(["pi-lora", "probe", result.model, *given])


def start_of(base: ModelSource, target: int) -> torch.Tensor:
    """Return the logarithms of the divisors that the search begins with: (divisors)."""
    buffers = [name for name, _ in base.base.meta_model.named_buffers()]
    ropes = [name for name in buffers if name.rpartition(".")[2] in FREQUENCIES]
    if len(ropes) != 1:
        raise ScalingError(
            f"model of type {base.config['model_type']}: has {len(ropes)} ropes for layers with full attention, and a "
            "search needs one; use another scaling"
        )
    scaled = start_rope(base, target).scaled_frequencies
    divisors = torch.tensor(base.rope.frequencies) / torch.tensor(scaled)
    return divisors.log()


def start_rope(base: ModelSource, target: int) -> Rope:
    """Return the rope of a base under the scaling that the search begins with; Phi-3 has no YaRN."""
    method: Method = "yarn" if "yarn" in base.rope.scalings else "theta"
    return Rope(extend_config(base.config, Extension(target, scaling=method)))


def allowed(logarithms: torch.Tensor) -> torch.Tensor:
    """Return the nearest logarithms of divisors with which no frequency is divided by less than a higher one, by less
    than 1, or by more than `LARGEST`.
    """
    # Isotonic regression: neighbors in the wrong order become their mean.
    blocks: list[list[float]] = []
    for value in logarithms.tolist():
        blocks.append([value])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    rising = [fmean(block) for block in blocks for _ in block]
    return torch.tensor(rising).clamp(0, math.log(LARGEST))


class Descent:
    """A descent by Adam: the `points` after the steps so far, logarithms of divisors, and the moments."""

    def __init__(self, start: torch.Tensor) -> None:
        self.point = start.clone()
        self.points: list[torch.Tensor] = []
        self.adam = torch.optim.Adam([self.point], betas=BETAS)

    def step(self, gradient: torch.Tensor) -> None:
        """Step along a gradient, to the nearest allowed point."""
        [settings] = self.adam.param_groups
        settings["lr"] = RATE / math.sqrt(1 + 3 * len(self.points) / STEPS_TO_HALF)
        self.point.grad = gradient
        self.adam.step()
        self.point.copy_(allowed(self.point))
        self.points.append(self.point.clone())

    def mean(self) -> torch.Tensor:
        """Return the mean of the last half of the points."""
        return torch.stack(self.points[len(self.points) // 2 :]).mean(dim=0)


class Results:
    """The results of a search in order, from a journal in `folder` or computed, and the seconds that each took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept: dict[Any, Any] = dict(read_journal(folder))
        self.seconds: list[float] = []

    def next(self, compute: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
        """Return the next result: it is read, or computed and written."""
        item = len(self.seconds)
        if item not in self.kept:
            started = time.monotonic()
            numbers = compute(*inputs).tolist()
            self.kept[item] = numbers, time.monotonic() - started
            append_journal(item, self.kept[item], self.folder)
        numbers, seconds = self.kept[item]
        self.seconds.append(seconds)
        return torch.tensor(numbers)


def descend(
    searched: Searched, descent: Descent, results: Results, *, limit: float, progress: Progress
) -> list[Scored]:
    """Descend for `limit` seconds, or until the needles no longer move. Return the scores of the start and of the means
    of steps at the target window.
    """

    def scored(point: torch.Tensor) -> Scored:
        with torch.no_grad():
            needles = results.next(searched.needle_loss, point, searched.long).item()
            text = results.next(searched.text_loss, point).item()
        return Scored(needles=needles, text=text, value=needles + PENALTY * text, point=point.tolist())

    scores = [scored(descent.point)]
    while sum(results.seconds) < limit and moves(scores):
        best = min(scores, key=attrgetter("value"))
        least_seconds = SHORT_SHARE * sum(results.seconds[-2:])
        first = len(results.seconds)
        while len(results.seconds) - first < LEAST_STEPS or sum(results.seconds[first:]) < least_seconds:
            exam = searched.exams.short()
            text = searched.exams.short_text()
            descent.step(results.next(searched.gradient, descent.point, exam, text))
            note = f"{len(descent.points):,} steps, needles {best.needles:.3f} nats, text {best.text:.3f}"
            progress(round(min(sum(results.seconds), limit)), round(limit), note)
        scores.append(scored(descent.mean()))
    return scores


def moves(scores: Sequence[Scored]) -> bool:
    """Whether the loss of the needles differs in the last `PATIENCE` scores."""
    needles = [score.needles for score in scores[-PATIENCE:]]
    return len(needles) < PATIENCE or max(needles) > (1 + LEAST_MOVE) * min(needles)


def search(base: ModelSource, options: SearchOptions, file: Path) -> SearchResult:
    """Search for the divisors with which a plain base reads and retrieves best at L' tokens, and write them to `file`.

    Every result is journalled until the file is written, so that an interrupted search continues. Raise ScalingError if
    the model cannot be extended by divisors, DataError if the text is too short.
    """
    if base.adapter:
        raise ModelError(f"{base.name}: is extended already; search for the base, {base.base.name}")
    frequencies = len(base.rope.frequencies)
    base.extended(Extension(options.target, scaling="factors", factors=(2.0,) * frequencies))
    descent = Descent(start_of(base, options.target))
    check_can_write(file)
    with Session(say=ui.say, journalled=True) as session:
        searched = Searched(base, options)
        decided_by = {**options.model_dump(exclude={"minutes"}), "texts": [text.digest for text in searched.texts]}
        folder = session.journal(searched.loaded, decided_by)
        assert folder
        with ui.progress(f"searching at {options.target:,}") as progress:
            scores = descend(searched, descent, Results(folder), limit=60 * options.minutes, progress=progress)
        start = scores[0]
        best = min(scores, key=attrgetter("value"))
        if not moves(scores):
            ui.say(
                f"the loss of the needles does not move ({start.needles:.3f} nats at the start, {best.needles:.3f} at "
                f"best): the search ends after {len(descent.points):,} steps"
            )
        result = SearchResult(
            model=base.name,
            original=base.rope.trained,
            factors=tuple(float(f"{math.exp(logarithm):.8g}") for logarithm in best.point),
            attention_factor=round(searched.attention_factor, 8),
            options=options,
            target=options.target,
            steps=len(descent.points),
            test_documents=searched.test_documents,
            scores={"start": start, "factors": best},
            hardware=hardware(),
            versions=versions(),
        )
        write_json(file, result.model_dump(mode="json", exclude_none=True))
    return result
