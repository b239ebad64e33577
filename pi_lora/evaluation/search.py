"""Search for divisors of the rotary frequencies by measuring, without tuning (LongRoPE2, Shang et al. 2025, arXiv
2502.20082).

LongRoPE2 searches the divisors by an evolution that is scored with the perplexity of needles. Here every forward pass
asks many needles one after the other, and the text around them is scored as well:

- the loss of the needles: numbers that were stated at all depths of the text, and are asked for at the end;
- the loss of the key tokens: those whose loss falls by distant context under a start (evaluation/context.py);
- what text in both windows loses against the unscaled base in its own window, times `PENALTY`.

The evolution begins with the divisors of YaRN, theta, llama3 and CoPE. No dimension is taken as critical: any smooth
change of neighboring divisors is tried, as long as no frequency is divided by less than a higher one. A child first
reads a short text whose chunks are spread over the target window, as in PoSE, and is scored by needles and text; only
the best child of a generation reads the target window.
"""

import math
import random
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel

from pi_lora.data.recall import DIGITS, FORMS, NAMES, THINGS
from pi_lora.data.tokens import added_bos
from pi_lora.errors import DataError, ModelError
from pi_lora.evaluation.context import LEAST_GAIN, MOST_LOSS
from pi_lora.evaluation.forward import check_numbers, token_losses
from pi_lora.evaluation.measurement import Session, append_journal, read_journal
from pi_lora.evaluation.perplexity import Sweep, scored_losses
from pi_lora.evaluation.texts import choose_documents, complete
from pi_lora.models.device import hardware, has_fast_bfloat16, versions
from pi_lora.models.loaded import load_model
from pi_lora.models.source import ModelSource
from pi_lora.models.weights import finite
from pi_lora.recipe.evaluation import ProbeOptions, SearchOptions, TextOptions
from pi_lora.scaling.config import Extension, Method, extend_config, methods_for, rotary_frequencies_of
from pi_lora.scaling.factors import DROPPED
from pi_lora.scaling.verify import build_on_meta, rotary_frequencies
from pi_lora.storage import digest_of
from pi_lora.types import SILENT, UI, Json

STARTS: tuple[Method, ...] = ("yarn", "theta", "llama3", "cope")
# A nat that the text loses costs as much as this many nats of a needle.
PENALTY = 20.0
# Needles of a text, and the tokens of a short text with the chunks that are spread over the target window.
NEEDLES = 24
SHORT_TOKENS = 4096
CHUNKS = 8
# Children of a generation, and the candidates they come from.
CHILDREN = 8
PARENTS = 4
# Standard deviations of a mutation: of the logarithm of the divisors, and of the factor of the attention.
SPREAD = 0.3
ATTENTION_SPREAD = 0.03
MAX_ATTENTION = 1.5
STATEMENT, QUESTION = (f"\n{form}" for form in FORMS[0])
# The frequencies of the layers that attend to the whole window, in a rotary module for all layers or by layer type.
FREQUENCIES = ("inv_freq", "full_attention_inv_freq")


class Candidate(NamedTuple):
    """The logarithms of the divisors, the highest frequency first, and the factor of the attention."""

    logarithms: tuple[float, ...]
    attention_factor: float

    @property
    def divisors(self) -> Json:
        """The factors of an extension, in four digits."""
        factors = tuple(float(f"{math.exp(logarithm):.4g}") for logarithm in self.logarithms)
        return {"factors": factors, "attention_factor": self.attention_factor}


class Exam(NamedTuple):
    """A text with needles: token ids (1, tokens), the first token that is scored, the tokens of the answers, counted
    from there, and other inputs of the model.
    """

    ids: torch.Tensor
    first: int
    answers: list[int]
    inputs: Mapping[str, torch.Tensor]

    @property
    def text_tokens(self) -> int:
        """The scored tokens before the first answer."""
        return self.answers[0] - 1

    def needle_loss(self, losses: Sequence[float]) -> float:
        """Return the mean loss of the answers."""
        return fmean(losses[answer] for answer in self.answers)

    def text_loss(self, losses: Sequence[float]) -> float:
        """Return the mean loss of the text."""
        return fmean(losses[: self.text_tokens])

    def value(self, losses: Sequence[float]) -> float:
        """Return what the answers and the text lose."""
        return self.needle_loss(losses) + PENALTY * self.text_loss(losses)


class Scored(BaseModel):
    """The losses of a candidate in nats: of the needles, of the key tokens, and of the text. `value` is what the search
    minimizes.
    """

    needles: float
    key_tokens: float
    text: float
    value: float


class SearchResult(BaseModel):
    """The best divisors, and the scores of the starts and of the best."""

    model: str
    original: int
    target: int
    factors: tuple[float, ...]
    attention_factor: float
    options: SearchOptions
    candidates: int
    test_documents: int
    scores: dict[str, Scored]
    hardware: str
    versions: dict[str, str]


class Searched:
    """A loaded base whose rotary frequencies are divided, and the texts that score the divisors."""

    def __init__(self, base: ModelSource, options: SearchOptions, dtype: str | None) -> None:
        self.base = base
        self.target = options.target
        self.loaded = load_model(base, dtype or ("bfloat16" if has_fast_bfloat16() else None))
        text_options = complete(TextOptions(data=options.data, column=options.column), [base])
        # The first documents are those of a test.
        [*self.others, self.text], _ = choose_documents(self.loaded, text_options, options.target)
        if not self.others:
            text = text_options.data
            raise DataError(f"--data: {text}: one document is long enough; the search and its test need two")
        rng = random.Random(options.seed)
        # The first tokens are left out: they have little before them.
        short_tokens = min(SHORT_TOKENS, self.target // 2)
        self.short = self._exam(short_tokens, rng, chunks=CHUNKS, first=short_tokens // 2)
        self.half = base.window // 2
        self.long = self._exam(self.target, rng, chunks=1, first=self.half)
        self.unscaled = self._unscaled_losses()
        self.rotary = [
            (part, name, plain.clone())
            for part in self.loaded.module.modules()
            for name, plain in part.named_buffers(recurse=False)
            if name in FREQUENCIES
        ]

    def _exam(self, tokens: int, rng: random.Random, chunks: int, first: int) -> Exam:
        """Return a text of at most `tokens` tokens with needles at all depths, scored from the token `first`. Several
        chunks are spread over the target window.
        """
        number = min(NEEDLES, tokens // 64)
        needles = []
        questions = []
        for name, thing in rng.sample([*product(NAMES, THINGS)], number):
            fact = {"name": name, "thing": thing, "value": "".join(rng.choices(DIGITS, k=5))}
            needles.append(self._tokens(STATEMENT.format(**fact) + "\n"))
            questions.append(QUESTION.format(**fact))
        rng.shuffle(questions)
        asked: list[int] = []
        answers: list[int] = []
        for question in questions:
            # The value and a full stop are the last word.
            before, _, _ = question.rpartition(" ")
            answer = len(asked) + len(self._tokens(before))
            asked += self._tokens(question)
            answers += range(answer, len(asked) - 1)
        part = (tokens - 1 - len(asked) - sum(map(len, needles))) // max(1, number)
        if part < 1:
            raise DataError(f"context.target: {self.target} tokens hold no needles; choose a longer window")
        bos = added_bos(self.loaded.tokenizer)
        ids = [] if bos is None else [bos]
        for index, needle in enumerate(needles):
            ids += self.text.ids[index * part : (index + 1) * part].tolist() + needle
        first = min(first, len(ids))
        answers = [len(ids) - first + answer for answer in answers]
        ids += asked
        row = torch.tensor([ids], device=self.loaded.module.device)
        inputs = {}
        if chunks > 1:
            positions = torch.arange(len(ids), device=row.device)
            gap = (self.target - len(ids)) // (chunks - 1)
            positions += gap * (positions * chunks // len(ids))
            # A mask of ones says that chunks with gaps between their positions are one sequence.
            inputs = {"position_ids": positions[None], "attention_mask": torch.ones_like(row)}
        return Exam(row, first, answers, inputs)

    def _unscaled_losses(self) -> torch.Tensor:
        """Return the losses of the scored tokens of the long text under the unscaled base, with half of its window or
        more before them: (tokens).
        """
        ids = self.long.ids[0].tolist()
        unscaled = torch.zeros(len(ids))
        for pieces in Sweep((self.base.window,), self.half).passes(len(ids), 1):
            for _, tokens, losses in scored_losses(self.loaded.module, ids, pieces, added_bos(self.loaded.tokenizer)):
                unscaled[tokens.start : tokens.stop] = losses
        return unscaled[self.half :]

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.loaded.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def use(self, candidate: Candidate) -> None:
        """Divide the rotary frequencies, and set the factor of the attention."""
        divisors = torch.tensor(candidate.divisors["factors"])
        for part, name, plain in self.rotary:
            setattr(part, name, plain / divisors.to(plain.device))
            setattr(part, name.replace("inv_freq", "attention_scaling"), candidate.attention_factor)

    def losses(self, exam: Exam, candidate: Candidate) -> list[float]:
        """Return the losses in nats of the scored tokens of a text."""
        self.use(candidate)
        scored = range(exam.first, exam.ids.shape[1])
        [losses] = token_losses(self.loaded.module, exam.ids, scored, **exam.inputs)
        check_numbers(self.loaded, finite(losses))
        return list(map(float, losses))

    def key_tokens(self, starts: Sequence[Sequence[float]]) -> list[int]:
        """Return the tokens beyond the original window that are key tokens under one of the starts, from the losses
        of the long text.
        """
        far = torch.tensor(starts).min(dim=0).values
        is_key = (self.unscaled - far > LEAST_GAIN) & (far < MOST_LOSS)
        return [token for token in range(self.half, self.long.text_tokens) if is_key[token]]

    def score(self, losses: Sequence[float], key_tokens: Sequence[int]) -> Scored:
        """Return the scores of a candidate from the losses of the long text."""
        key_loss = fmean(losses[token] for token in key_tokens) if key_tokens else 0.0
        before = self.unscaled[: self.long.text_tokens].mean().item()
        return Scored(
            needles=self.long.needle_loss(losses),
            key_tokens=key_loss,
            text=self.long.text_loss(losses),
            value=self.long.value(losses) + key_loss - PENALTY * before,
        )


def options_of_test(result: SearchResult, file: Path) -> ProbeOptions:
    """Return the options of a probe of the result in `file` beside the starts, on other text and with other keys."""
    options = result.options
    return ProbeOptions(
        target=(result.target,),
        scalings=(*(name for name in result.scores if name != "factors"), "factors"),
        factors=str(file),
        data=options.data,
        column=options.column,
        documents=min(options.documents, result.test_documents),
        trials=options.trials,
        seed=options.seed + 1,
    )


def start_of(base: ModelSource, method: Method, target: int) -> Candidate:
    """Return the divisors of a scaling, from the frequencies that transformers computes."""
    extension = Extension(target, scaling=method)
    config_class = base.base.config_class
    assert config_class
    scaled = rotary_frequencies(build_on_meta(config_class, extend_config(base.config, extension)))
    [frequencies] = [values for name, values in scaled.items() if name.rpartition(".")[2] in FREQUENCIES]
    divisors = torch.tensor(rotary_frequencies_of(base.config)) / frequencies
    attention_factor = 1.0
    if method == "yarn":
        attention_factor = 0.1 * math.log(extension.scale_of(base.config)) + 1
    return Candidate(tuple(divisors.clamp(1, DROPPED).log().tolist()), attention_factor)


def child_of(parents: Sequence[Candidate], rng: random.Random) -> Candidate:
    """Mix two parents, and change the divisors around a random frequency; higher frequencies are divided by no more."""
    first, second = rng.choices(parents, k=2)
    share = rng.random()
    number = len(first.logarithms)
    center = rng.uniform(0, number)
    width = rng.uniform(1, number / 3)
    change = rng.gauss(0, SPREAD)
    bump = (1 - (torch.arange(number) - center).abs() / width).clamp(min=0)
    own = torch.tensor([first.logarithms, second.logarithms], dtype=torch.double)
    mixed = share * own[0] + (1 - share) * own[1] + change * bump
    logarithms = mixed.cummax(dim=0).values.clamp(0, math.log(DROPPED))
    attention = share * first.attention_factor + (1 - share) * second.attention_factor
    attention = min(max(1.0, attention + rng.gauss(0, ATTENTION_SPREAD)), MAX_ATTENTION)
    return Candidate(tuple(logarithms.tolist()), round(attention, 4))


def search(base: ModelSource, options: SearchOptions, *, dtype: str | None = None, ui: UI = SILENT) -> SearchResult:
    """Search for the divisors with which a plain base reads and retrieves best at L' tokens.

    Every result is journalled, so that an interrupted search continues. Raise ScalingError if the model cannot be
    extended by divisors, DataError if the text is too short.
    """
    if base.adapter:
        raise ModelError(f"{base.name}: brings its own scaling; search for its base, {base.base.name}")
    frequencies = len(rotary_frequencies_of(base.config))
    base.extended(Extension(options.target, scaling="factors", factors=(2.0,) * frequencies))
    with Session(say=ui.say, journalled=True) as session, ui.progress(f"searching at {options.target:,}") as progress:
        searched = Searched(base, options, dtype)
        decided_by = {**options.model_dump(exclude={"minutes"}), "text": searched.text.digest}
        folder = session.journal(searched.loaded, decided_by)
        assert folder
        kept: dict[Any, Any] = dict(read_journal(folder))
        limit = 60 * options.minutes
        spent: list[float] = []

        def measured(exam: Exam, candidate: Candidate) -> list[float]:
            losses: list[float]
            key = digest_of([exam.ids.shape[1], candidate.divisors])
            if key not in kept:
                started = time.monotonic()
                losses = searched.losses(exam, candidate)
                kept[key] = losses, time.monotonic() - started
                append_journal(key, kept[key], folder)
            losses, seconds = kept[key]
            spent.append(seconds)
            return losses

        methods = [method for method in STARTS if method in methods_for(base.config)]
        starts = {method: start_of(base, method, options.target) for method in methods}
        losses_of_starts = {start: measured(searched.long, start) for start in starts.values()}
        key_tokens = searched.key_tokens([*losses_of_starts.values()])
        scores = {start: searched.score(losses, key_tokens) for start, losses in losses_of_starts.items()}
        by_score = sorted(scores, key=lambda candidate: scores[candidate].value)
        rng = random.Random(options.seed)
        while sum(spent) < limit:
            children = [child_of(by_score[:PARENTS], rng) for _ in range(CHILDREN)]
            child = min(children, key=lambda child: searched.short.value(measured(searched.short, child)))
            scores[child] = searched.score(measured(searched.long, child), key_tokens)
            by_score = sorted(scores, key=lambda candidate: scores[candidate].value)
            note = f"{len(spent):,} texts read, the best has {scores[by_score[0]].value:.3f} nats"
            progress(round(min(sum(spent), limit)), round(limit), note)
    best = by_score[0]
    return SearchResult(
        model=base.name,
        original=base.window,
        **best.divisors,
        options=options,
        target=options.target,
        candidates=len(spent) - len(scores) + len(starts),
        test_documents=len(searched.others),
        scores={**{name: scores[start] for name, start in starts.items()}, "factors": scores[best]},
        hardware=hardware(),
        versions=versions(),
    )
