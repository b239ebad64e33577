"""Search for divisors of the rotary frequencies by measuring, without tuning (LongRoPE2, Shang et al. 2025, arXiv
2502.20082).

LongRoPE2 searches the divisors by an evolution that is scored with the perplexity of needles. Here every forward pass
asks many needles one after the other, and the text around them is scored as well:

- the loss of the needles: numbers that were stated at all depths of the text, and are asked for at the end;
- the loss of the key tokens: those whose loss falls by distant context under a start (evaluation/context.py);
- what the original window loses against the unscaled base, times `PENALTY`.

The evolution begins with the divisors of YaRN, theta, llama3 and CoPE. No dimension is taken as critical: any smooth
change of neighboring divisors is tried, as long as no frequency is divided by less than a higher one. A child first
reads a short text whose chunks are spread over the target window, as in PoSE; only the best child of a generation reads
the target window.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel

from pi_lora.data.recall import FORMS, NAMES, THINGS
from pi_lora.data.tokens import added_bos
from pi_lora.errors import DataError, ModelError
from pi_lora.evaluation.context import LEAST_GAIN, MOST_LOSS
from pi_lora.evaluation.forward import check_numbers, token_losses
from pi_lora.evaluation.measurement import Session, append_journal, read_journal
from pi_lora.evaluation.texts import choose_documents, complete
from pi_lora.models.device import hardware, has_fast_bfloat16, versions
from pi_lora.models.loaded import LoadedModel, load_model
from pi_lora.models.source import ModelSource
from pi_lora.recipe.evaluation import ProbeOptions, SearchOptions, TextOptions
from pi_lora.scaling.config import Extension, Method, extend_config, methods_for, rotary_frequencies_of
from pi_lora.scaling.factors import DROPPED
from pi_lora.scaling.verify import build_on_meta, config_of, rotary_frequencies
from pi_lora.storage import digest_of
from pi_lora.types import SILENT, UI, Json

STARTS: tuple[Method, ...] = ("yarn", "theta", "llama3", "cope")
# A nat that the text of the original window loses costs as much as this many nats of a needle.
PENALTY = 10.0
# Needles of a text, and the tokens of a short text with the chunks that are spread over the target window.
NEEDLES = 24
SHORT_TOKENS = 4096
CHUNKS = 8
DIGITS = 5
# Children of a generation, and the candidates they come from.
CHILDREN = 8
PARENTS = 4
# Standard deviations of a mutation: of the logarithm of the divisors, and of the factor of the attention.
SPREAD = 0.3
ATTENTION_SPREAD = 0.03
MAX_ATTENTION = 1.5
STATEMENT, QUESTION = FORMS[0]


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
    """A text with needles: token ids (1, tokens), the tokens of the answers, and other inputs of the model."""

    ids: torch.Tensor
    answers: list[int]
    inputs: Mapping[str, torch.Tensor] = MappingProxyType({})


class Scored(BaseModel):
    """The losses of a candidate in nats: of the needles, of the key tokens, and of text in the original window. `value`
    is what the search minimizes.
    """

    needles: float
    key_tokens: float
    original_window: float
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
    """A loaded base whose rotary embeddings are exchanged, and the texts that score them."""

    def __init__(self, base: ModelSource, options: SearchOptions, dtype: str | None) -> None:
        self.base = base
        self.target = options.target
        self.loaded: LoadedModel = load_model(base, dtype or ("bfloat16" if has_fast_bfloat16() else None))
        text_options = complete(TextOptions(data=options.data, column=options.column), [base])
        documents, _ = choose_documents(self.loaded, text_options, options.target)
        if len(documents) < 2:
            text = text_options.data
            raise DataError(f"--data: {text}: one document is long enough; the search and its test need two")
        self.documents = len(documents) - 1
        # The first documents are those of a test.
        self.ids = list(documents[-1].ids)
        self.digest = documents[-1].digest
        self.bos = added_bos(self.loaded.tokenizer)
        rng = random.Random(options.seed)
        self.short = self._exam(min(SHORT_TOKENS, self.target // 2), rng, spread=True)
        self.long = self._exam(self.target, rng, spread=False)
        beyond = range(base.window, self.long.answers[0] - 1)
        self.beyond = list(beyond)
        self.inside = list(range(base.window // 2, base.window))
        first_tokens = Exam(self.long.ids[:, : base.window], [])
        self.inside_loss = self._losses(first_tokens, self.inside).mean().item()
        self.near_losses = self._near_losses()

    def _exam(self, tokens: int, rng: random.Random, *, spread: bool) -> Exam:
        """Return a text of `tokens` tokens with needles at all depths; `spread` over the target window in chunks."""
        number = min(NEEDLES, tokens // 64)
        needles = []
        questions = []
        for name, thing in rng.sample([(name, thing) for name in NAMES for thing in THINGS], number):
            value = "".join(rng.choices("0123456789", k=DIGITS))
            needles.append(self._tokens(f"\n{STATEMENT.format(thing=thing, name=name, value=value)}\n"))
            question = f"\n{QUESTION.format(thing=thing, name=name, value=value)}"
            before_answer = self._tokens(question[: question.rindex(value)].rstrip())
            questions.append((self._tokens(question), len(before_answer)))
        rng.shuffle(questions)
        asked: list[int] = []
        answers: list[int] = []
        for question_ids, first in questions:
            answers += range(len(asked) + first, len(asked) + len(question_ids) - 1)
            asked += question_ids
        text_tokens = tokens - 1 - len(asked) - sum(map(len, needles))
        if text_tokens < number:
            raise DataError(f"context.target: {self.target} tokens hold no needles; choose a longer window")
        part = text_tokens // number
        ids = [] if self.bos is None else [self.bos]
        for index, needle in enumerate(needles):
            ids += self.ids[index * part : (index + 1) * part] + needle
        answers = [len(ids) + index for index in answers]
        ids += asked
        exam = Exam(torch.tensor([ids]), answers)
        if not spread:
            return exam
        chunk = -(-len(ids) // CHUNKS)
        gap = (self.target - len(ids)) // (CHUNKS - 1)
        positions = [position + gap * (position // chunk) for position in range(len(ids))]
        # A mask of ones says that chunks with gaps between their positions are one sequence.
        inputs = {"position_ids": torch.tensor([positions]), "attention_mask": torch.ones_like(exam.ids)}
        return exam._replace(inputs=inputs)

    def _near_losses(self) -> torch.Tensor:
        """Return the losses of the unscaled base for the tokens beyond the original window, with half of that window
        or more before them.
        """
        window = self.base.window
        parts = []
        for start in range(window // 2, self.beyond[-1] + 1 - window // 2, window // 2):
            ids = self.long.ids[:, start : start + window].clone()
            if self.bos is not None:
                ids[:, 0] = self.bos
            scored = range(window // 2, min(window, self.beyond[-1] + 1 - start))
            parts.append(token_losses(self.loaded.module, ids.to(self.loaded.module.device), scored)[0])
        return torch.cat(parts)

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.loaded.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _losses(self, exam: Exam, tokens: Sequence[int]) -> torch.Tensor:
        """Return the losses in nats of some tokens of a text."""
        module = self.loaded.module
        inputs = {name: values.to(module.device) for name, values in exam.inputs.items()}
        return token_losses(module, exam.ids.to(module.device), tokens, **inputs)[0]

    def use(self, candidate: Candidate) -> None:
        """Exchange the rotary embeddings of the model for those of a candidate."""
        module = self.loaded.module
        extension = Extension(self.target, scaling="factors", **candidate.divisors)
        typed = config_of(type(module.config), extend_config(self.base.config, extension))
        rotary = [name for name, part in module.named_modules() if has_frequencies(part)]
        for name in rotary:
            parent, _, child = name.rpartition(".")
            kind: Any = type(module.get_submodule(name))
            setattr(module.get_submodule(parent), child, kind(config=typed.get_text_config()).to(module.device))

    def short_losses(self, candidate: Candidate) -> list[float]:
        """Return the losses of the needles of the short text."""
        self.use(candidate)
        return self._losses(self.short, self.short.answers).tolist()

    def long_losses(self, candidate: Candidate) -> list[float]:
        """Return the losses of text in the original window, of text beyond it, and of the needles."""
        self.use(candidate)
        return self._losses(self.long, [*self.inside, *self.beyond, *self.long.answers]).tolist()

    def is_key(self, starts: Sequence[Sequence[float]]) -> torch.Tensor:
        """Return which tokens beyond the original window are key tokens under one of the starts, from `long_losses`."""
        far_losses = torch.stack([self._parts(losses)[1] for losses in starts]).min(dim=0).values
        return (self.near_losses - far_losses > LEAST_GAIN) & (far_losses < MOST_LOSS)

    def score(self, losses: Sequence[float], is_key: torch.Tensor) -> Scored:
        """Return the scores of a candidate from `long_losses`."""
        inside, beyond, needles = self._parts(losses)
        key_loss = beyond[is_key].mean().item() if is_key.any() else 0.0
        lost = max(0.0, inside.mean().item() - self.inside_loss)
        return Scored(
            needles=needles.mean().item(),
            key_tokens=key_loss,
            original_window=inside.mean().item(),
            value=needles.mean().item() + key_loss + PENALTY * lost,
        )

    def _parts(self, losses: Sequence[float]) -> Sequence[torch.Tensor]:
        sizes = [len(self.inside), len(self.beyond), len(self.long.answers)]
        return torch.split(torch.tensor(losses), sizes)


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


def has_frequencies(module: torch.nn.Module) -> bool:
    """Whether a module has rotary frequencies of its own."""
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def start_of(base: ModelSource, method: Method, target: int) -> Candidate:
    """Return the divisors of a scaling, from the frequencies that transformers computes."""
    extension = Extension(target, scaling=method)
    config_class = base.base.config_class
    assert config_class
    plain, scaled = (
        rotary_frequencies(build_on_meta(config_class, config))
        for config in (base.config, extend_config(base.config, extension))
    )
    name = next(name for name in plain if not torch.equal(plain[name], scaled[name]))
    logarithms = (plain[name] / scaled[name]).clamp(1, DROPPED).log().tolist()
    attention_factor = 1.0
    if method == "yarn":
        attention_factor = 0.1 * math.log(extension.scale_of(base.config)) + 1
    return Candidate(tuple(logarithms), attention_factor)


def child_of(parents: Sequence[Candidate], rng: random.Random) -> Candidate:
    """Mix two parents, and change the divisors around a random frequency; higher frequencies are divided by no more."""
    first, second = rng.choice(parents), rng.choice(parents)
    share = rng.random()
    number = len(first.logarithms)
    center = rng.uniform(0, number)
    width = rng.uniform(1, number / 3)
    change = rng.gauss(0, SPREAD)
    logarithms = []
    highest = 0.0
    for index in range(number):
        mixed = share * first.logarithms[index] + (1 - share) * second.logarithms[index]
        mixed += change * max(0.0, 1 - abs(index - center) / width)
        highest = min(max(highest, mixed), math.log(DROPPED))
        logarithms.append(highest)
    attention = share * first.attention_factor + (1 - share) * second.attention_factor
    attention = min(max(1.0, attention + rng.gauss(0, ATTENTION_SPREAD)), MAX_ATTENTION)
    return Candidate(tuple(logarithms), round(attention, 4))


def search(base: ModelSource, options: SearchOptions, *, dtype: str | None = None, ui: UI = SILENT) -> SearchResult:
    """Search for the divisors with which a plain base reads and retrieves best at L' tokens.

    Every result is journalled, so that an interrupted search continues. Raise ScalingError if the model cannot be
    extended by divisors, DataError if the text is too short.
    """
    if base.adapter:
        raise ModelError(f"{base.name}: brings its own scaling; search for its base, {base.base.name}")
    frequencies = len(rotary_frequencies_of(base.config))
    base.extended(Extension(options.target, scaling="factors", factors=(2.0,) * frequencies))
    methods = [method for method in methods_for(base.config) if method in STARTS]
    with Session(say=ui.say, journalled=True) as session, ui.progress(f"searching at {options.target:,}") as progress:
        searched = Searched(base, options, dtype)
        decided_by = {**options.model_dump(exclude={"minutes"}), "text": searched.digest}
        folder = session.journal(searched.loaded, decided_by)
        assert folder
        kept: dict[Any, Any] = dict(read_journal(folder))
        limit = 60 * options.minutes
        spent = 0.0

        def measured(measure: Callable[[Candidate], list[float]], candidate: Candidate) -> list[float]:
            nonlocal spent
            key = digest_of([measure.__name__, candidate.divisors])
            if key not in kept:
                started = time.monotonic()
                kept[key] = {"losses": measure(candidate), "seconds": time.monotonic() - started}
                append_journal(key, kept[key], folder)
            spent += kept[key]["seconds"]
            losses: list[float] = kept[key]["losses"]
            check_numbers(searched.loaded, all(map(math.isfinite, losses)))
            return losses

        starts = {method: start_of(base, method, options.target) for method in methods}
        losses_of_starts = [measured(searched.long_losses, start) for start in starts.values()]
        is_key = searched.is_key(losses_of_starts)
        scores = {name: searched.score(losses, is_key) for name, losses in zip(starts, losses_of_starts, strict=True)}
        population = [(score.value, starts[name]) for name, score in scores.items()]
        best, best_score = min(zip(starts.values(), scores.values(), strict=True), key=lambda pair: pair[1].value)
        rng = random.Random(options.seed)
        tried = len(starts)
        while spent < limit:
            population.sort(key=itemgetter(0))
            parents = [candidate for _, candidate in population[:PARENTS]]
            children = [child_of(parents, rng) for _ in range(CHILDREN)]
            child = min(children, key=lambda child: fmean(measured(searched.short_losses, child)))
            score = searched.score(measured(searched.long_losses, child), is_key)
            population.append((score.value, child))
            tried += len(children)
            if score.value < best_score.value:
                best, best_score = child, score
            note = f"{tried} candidates, the best has {best_score.value:.3f} nats"
            progress(round(min(spent, limit)), round(limit), note)
    return SearchResult(
        model=base.name,
        original=base.window,
        **best.divisors,
        options=options,
        target=options.target,
        candidates=tried,
        test_documents=searched.documents,
        scores={**scores, "factors": best_score},
        hardware=hardware(),
        versions=versions(),
    )
