"""Passkey retrieval (Mohtashami and Jaggi 2023; paper.tex, section 3.3): the prompt of figure 3, trials of one forward
pass each, typed scores, metrics and picture.
"""

import random
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from statistics import fmean
from typing import Annotated, Any, NamedTuple

from pydantic import Field, field_validator

from pi_lora.data.chats import chat_prompt
from pi_lora.data.tokens import prompt_ids
from pi_lora.drawing import Panel, draw_curves
from pi_lora.errors import DataError
from pi_lora.evaluation.duration import Pass, budget_here
from pi_lora.evaluation.forward import (
    SharedPrefix,
    check_numbers,
    last_logits,
    shared_prefix,
)
from pi_lora.evaluation.measurement import (
    About,
    Measurement,
    Metric,
    Preview,
    Result,
    Scores,
    Session,
    Value,
    header_of,
    longest_passing,
    proportion,
)
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.source import ModelSource
from pi_lora.models.weights import finite
from pi_lora.recipe.evaluation import PasskeyOptions
from pi_lora.types import Json

HEADER = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
STATEMENT = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key?"
BEGINNING = "The pass key is"
DIGITS = 5
# The share of trials that succeed up to k_max.
REQUIRED_SUCCESS = 0.2


class PasskeyDepth(Result):
    """The trials at one depth. From the key to the end are `k` tokens as requested, and `distance` tokens as placed."""

    k: int
    distance: int | None = None
    success_rate: Annotated[float, Field(ge=0, le=1)]
    trials: int
    outcomes: list[bool] | None = None


class PasskeyLength(Result):
    """Passkey retrieval over `target` tokens of context: `k_max` in tokens, and the depths, the nearest first."""

    target: int
    k_max: int
    depths: list[PasskeyDepth]


class PasskeyScores(Scores):
    """Passkey retrieval over `target` tokens of context; of several `lengths`, `target` is the longest."""

    measurement = "passkey"

    options: PasskeyOptions
    seed: int = 0
    decoding: str = "greedy"
    target: int
    k_max: int
    depths: list[PasskeyDepth]
    lengths: Annotated[list[PasskeyLength] | None, Field(min_length=1)] = None

    @field_validator("options", mode="before")
    @classmethod
    def _with_amount(cls, options: Any) -> Any:
        """Return options with depths and trials: files before November 2026 leave these defaults out."""
        given = options.model_dump(exclude_unset=True) if isinstance(options, PasskeyOptions) else options
        return {"depths": 32, "trials": 10, **given}

    @property
    def by_length(self) -> Sequence["PasskeyLength | PasskeyScores"]:
        """Every length of context that was measured, the shortest first."""
        return self.lengths or [self]


class Passkey(Measurement[PasskeyOptions, PasskeyScores]):
    """Passkey retrieval (paper, section 3.3)."""

    options = PasskeyOptions
    scores = PasskeyScores

    def prepare(self, options: PasskeyOptions, models: Sequence[ModelSource]) -> PasskeyOptions:
        """Fill in the target, the longest window, and the depths and trials."""
        if not options.longest:
            options = options.changed(target=max(model.window for model in models))
        return options.changed(**options.amount(budget_here()))

    def problems(self, options: PasskeyOptions, preview: Preview) -> Iterator[str]:
        """Yield that the shortest context does not hold the prompt."""
        target = min(options.targets or [options.target or preview.window])
        if preview.tokenizer:
            try:
                make_trial(preview.tokenizer, target, k=target, key="0" * DIGITS, chat=options.chat is True)
            except DataError as problem:
                yield str(problem).replace("--target", preview.key("target"))

    def measure(self, model: LoadedModel, options: PasskeyOptions, session: Session) -> PasskeyScores:
        """Measure one or several lengths of context. Each process measures a share of the depths, and an interrupted
        evaluation continues with the next call.
        """
        targets = sorted(options.targets or [options.target or 0])
        lengths = [self._measure_length(model, target, options, session) for target in targets]
        longest = lengths[-1]
        # Only fields that were set are written: `lengths` is set only if several were requested.
        several = {"lengths": lengths} if options.targets else {}
        return PasskeyScores(
            **header_of(model),
            options=options,
            seed=options.seed,
            decoding="greedy",
            target=longest.target,
            k_max=longest.k_max,
            depths=longest.depths,
            **several,
        )

    def _measure_length(
        self, model: LoadedModel, target: int, options: PasskeyOptions, session: Session
    ) -> PasskeyLength:
        """Measure all depths of one length of context."""
        test = PasskeyTest(model, target, options)
        # The first trial shows how the tokenizer splits the prompt.
        decided_by = {"target": target, "first": test.first}
        trials = test.trials_of_depth
        less = ("trials", trials // 4 or 1) if trials > 1 else ("depths", test.depths // 4)
        results = session.map_items(
            model,
            options,
            decided_by,
            items=range(test.depths),
            function=test.measure,
            about=About("passkey", f"{test.depths * trials} prompts of {target:,} tokens", less),
            passes=test.passes,
        )
        depths = [PasskeyDepth.model_validate(result) for result in results]
        return PasskeyLength(target=target, k_max=k_max(depths), depths=depths)

    def metrics(self, scores: PasskeyScores) -> Iterator[Metric]:
        """Yield k_max and the share of keys that were retrieved, by length of context."""
        for length in scores.by_length:
            dataset = f"passkey retrieval in {length.target} tokens"
            yield Metric(
                label="k_max",
                value=length.k_max,
                unit="tokens",
                at=length.target,
                dataset=dataset,
                hub_name="k_max",
            )
            trials = [
                Value(f"key {scores.seed}/{trial} at {depth.k} of {length.target}", float(outcome))
                for depth in length.depths
                for trial, outcome in enumerate(depth.outcomes or ())
            ]
            if trials:
                yield proportion(
                    label="passkeys retrieved",
                    mean=fmean(trial.value for trial in trials),
                    samples=len(trials),
                    at=length.target,
                    values=trials,
                    dataset=dataset,
                    hub_name="accuracy",
                )

    def panels(self, scores: Mapping[str, PasskeyScores]) -> list[Panel]:
        """Return success by distance, and for a model in several lengths depth against length."""
        maps = [partial(_draw_map, label, result.lengths) for label, result in scores.items() if result.lengths]
        return [partial(_draw_distances, scores), *maps]


def _draw_distances(scores: Mapping[str, PasskeyScores], axes: Any) -> None:
    """Draw the share of retrieved keys by distance, a curve for each model, and the share that k_max requires."""
    curves = {}
    for label, result in scores.items():
        points = [(depth.k, 100 * depth.success_rate) for depth in result.depths]
        curves[f"{label}: k_max {result.k_max:,}"] = points
    draw_curves(curves, axes, xlabel="distance of the passkey (tokens)", ylabel="retrieved (%)")
    required = f"required for k_max ({REQUIRED_SUCCESS:.0%})"
    axes.axhline(100 * REQUIRED_SUCCESS, color="0.55", linestyle="--", linewidth=1.2, label=required)
    axes.set_ylim(-4, 104)


def _draw_map(label: str, lengths: Sequence[PasskeyLength], axes: Any) -> None:
    """Draw depth against length. The start of the text is at the top, and all lengths have the same width. Colors go
    from red to blue, which color-blind people can tell apart.
    """
    columns = [[depth.success_rate for depth in reversed(length.depths)] for length in lengths]
    rows = list(zip(*columns, strict=True))
    extent = (0, len(lengths), 100, 0)
    image = axes.imshow(rows, aspect="auto", extent=extent, cmap="RdYlBu", vmin=0, vmax=1)
    centers = [index + 0.5 for index in range(len(lengths))]
    axes.set_xticks(centers, [f"{length.target:,}" for length in lengths])
    axes.set(xlabel="length (tokens)", ylabel="depth of the passkey (%)")
    axes.figure.colorbar(image, ax=axes, label=f"share retrieved by {label}")


class Trial(NamedTuple):
    """Token ids of a prompt and the answer, which have `length` tokens together. From the first digit of the key to the
    end of both are `distance` tokens.
    """

    prompt: list[int]
    answer: list[int]
    distance: int
    length: int


def distances(target: int, depths: int) -> list[int]:
    """Return the distances of `depths` depths in tokens, evenly spaced up to `target`, the nearest first.

    >>> distances(8192, 32)[:3], distances(8192, 32)[-1]
    ([256, 512, 768], 8192)
    """
    return [round(target * (index + 1) / depths) for index in range(depths)]


def prompt(key: str, before: int, after: int, tokenizer: Any = None) -> str:
    """Return the paper's prompt (figure 3) with the filler repeated `before` and `after` times around the key. With a
    tokenizer, the prompt is in the chat template.
    """
    filler_before = " ".join([FILLER] * before)
    filler_after = " ".join([FILLER] * after)
    lines = (HEADER, filler_before, STATEMENT.format(key=key), filler_after, QUESTION)
    question = "\n".join(filter(None, lines))
    if tokenizer is not None:
        return chat_prompt(tokenizer, question, BEGINNING)
    return f"{question} {BEGINNING}"


def make_trial(tokenizer: Any, target: int, k: int, key: str, *, chat: bool = False) -> Trial:
    """Return a trial of `target` tokens to within one filler, with the key about `k` tokens from the end. With `chat`,
    the model is asked in its chat template.
    """
    encoded = partial(_trial, tokenizer, key, chat=chat)
    bare = encoded(before=0, after=0)
    shorter = encoded(before=1, after=1)
    longer = encoded(before=1, after=2)
    filler_tokens = longer.length - shorter.length
    fillers = (target - bare.length) // filler_tokens
    if fillers < 0:
        raise DataError(
            f"--target: {target} tokens do not hold the passkey prompt, which needs {bare.length}; choose a longer one"
        )
    fillers_after_key = max(0, round((k - bare.distance) / filler_tokens))
    # At the start of a line a filler may take more tokens than inside a line: one filler fewer may be needed.
    while True:
        after = min(fillers, fillers_after_key)
        trial = encoded(before=fillers - after, after=after)
        if trial.length <= target or fillers == 0:
            return trial
        fillers -= 1


def _trial(tokenizer: Any, key: str, before: int, after: int, *, chat: bool) -> Trial:
    """Return the trial with `before` and `after` fillers around the key."""
    text = prompt(key, before, after, tokenizer if chat else None)
    ids_of_prompt = prompt_ids(tokenizer, text)
    # Encoded together and then split: the token of the blank before the answer differs between tokenizers.
    text_with_answer = f"{text} {key}"
    ids = prompt_ids(tokenizer, text_with_answer)
    key_start = text.index(key)
    if tokenizer.is_fast:
        first_digit = tokenizer(text_with_answer, verbose=False).char_to_token(key_start)
    else:
        # Slow tokenizers do not map characters to tokens.
        first_digit = len(prompt_ids(tokenizer, text[:key_start].rstrip()))
    return Trial(
        prompt=ids_of_prompt,
        answer=ids[len(ids_of_prompt) :],
        distance=len(ids) - first_digit,
        length=len(ids),
    )


class PasskeyTest:
    """Runs the passkey trials: random keys at several distances up to `target` tokens.

    One forward pass over prompt and answer decides a trial. As in greedy decoding, every digit must be the model's
    first choice after the digits before it. Text ahead of the key is computed once if that saves time and fits into
    memory.
    """

    def __init__(self, loaded: LoadedModel, target: int, options: PasskeyOptions) -> None:
        self.loaded = loaded
        self.target = target
        self.chat = options.chat is True
        amount = options.amount(budget_here())
        self.depths: int = amount["depths"]
        self.trials_of_depth: int = amount["trials"]
        self.ks = distances(target, self.depths)
        rng = random.Random(options.seed)
        self.keys = [
            ["".join(rng.choices(string.digits, k=DIGITS)) for _ in range(self.trials_of_depth)] for _ in self.ks
        ]
        self.first = self.trials(0)[0]

    def trials(self, depth: int) -> list[Trial]:
        """Return the trials at one depth; raise DataError if a prompt does not fit."""
        k = self.ks[depth]
        return [make_trial(self.loaded.tokenizer, self.target, k, key, chat=self.chat) for key in self.keys[depth]]

    def passes(self, depth: int) -> list[Pass]:
        """Return the tokens that are read at a depth: without those ahead of the key, if prompts can share them."""
        source = self.loaded.source
        is_shared = not source.rope.depends_on_length and not source.config.get("sliding_window")
        return [(self.target - self.ks[depth] if is_shared else 0, self.target)] * self.trials_of_depth

    def measure(self, depth: int) -> Json:
        """Return the fields of PasskeyDepth for one depth."""
        trials = self.trials(depth)
        outcomes = [self._succeeds(trial) for trial in trials]
        return {
            "k": self.ks[depth],
            "distance": trials[0].distance,
            "success_rate": sum(outcomes) / len(outcomes),
            "trials": len(outcomes),
            "outcomes": outcomes,
        }

    @cached_property
    def _prefix(self) -> SharedPrefix | None:
        """The text ahead of the key that is nearest to the end, which is the longest such text. Computing it costs one
        prompt; a trial then saves half a prompt on average.
        """
        if self.loaded.source.rope.depends_on_length:
            return None
        tokens_ahead = self.first.length - self.first.distance
        return shared_prefix(self.loaded.module, self.first.prompt[:tokens_ahead], self.target)

    def _succeeds(self, trial: Trial) -> bool:
        # The prediction after the last digit is not needed.
        ids = [*trial.prompt, *trial.answer[:-1]]
        logits = last_logits(
            self.loaded.module,
            ids,
            tail=len(trial.answer),
            prefix=self._prefix,
        )
        check_numbers(self.loaded, finite(logits))
        return bool(logits.argmax(-1).tolist() == trial.answer)


def k_max(depths: Sequence[PasskeyDepth]) -> int:
    """Return the largest k such that every k' <= k succeeds at least 20 % of the time; 0 if the nearest fails."""
    return longest_passing({depth.k: depth.success_rate for depth in depths}, REQUIRED_SUCCESS)
