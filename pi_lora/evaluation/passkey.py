"""Passkey retrieval (Mohtashami and Jaggi 2023; paper.tex, section 3.3): the prompt of figure 3, its trials in one
forward pass each, typed scores, metrics and picture.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import Field

from pi_lora.drawing import Panel, draw_curves
from pi_lora.errors import DataError
from pi_lora.evaluation.forward import (
    SharedPrefix,
    check_numbers,
    depends_on_length,
    forget_lengths,
    last_logits,
    shared_prefix,
    without_end,
)
from pi_lora.evaluation.measurement import (
    Measurement,
    Metric,
    Result,
    Scores,
    Session,
    Value,
    longest_passing,
    proportion,
)
from pi_lora.models.model import Model
from pi_lora.models.weights import finite
from pi_lora.recipe.evaluation import PasskeyOptions
from pi_lora.types import Json

HEADER = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
STATEMENT = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"
DIGITS = 5
# The share of trials that succeed up to k_max.
REQUIRED_SUCCESS = 0.2


class PasskeyDepth(Result):
    """The trials at one depth: `k` as asked for, `distance` as placed, in tokens from the key to the end."""

    k: int
    distance: int | None = None
    success_rate: float = Field(ge=0, le=1)
    trials: int
    outcomes: list[bool] | None = None


class PasskeyLength(Result):
    """Passkey retrieval over `target` tokens of context; `k_max` in tokens, depths from the nearest."""

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
    lengths: list[PasskeyLength] | None = Field(None, min_length=1)

    @property
    def by_length(self) -> Sequence["PasskeyLength | PasskeyScores"]:
        """Every length of context that was measured, the shortest first."""
        return self.lengths or [self]


class Passkey(Measurement[PasskeyOptions, PasskeyScores]):
    """Passkey retrieval (paper, section 3.3)."""

    scores = PasskeyScores

    def prepare(self, options: PasskeyOptions, models: Sequence[Model]) -> PasskeyOptions:
        """Fill in the target: the longest window."""
        if options.longest:
            return options
        return options.changed(target=max(model.window for model in models))

    def measure(self, model: Model, options: PasskeyOptions, session: Session) -> Json:
        """Measure one or several lengths of context. If the session is shared, each process measures its share of the
        depths, and an interrupted evaluation continues when it is called again.
        """
        lengths = []
        for target in sorted(options.targets or [options.target or 0]):
            test = PasskeyTest(model, target, options)
            # The first trial tells what the tokenizer makes of the prompt.
            decided_by = {**options.model_dump(), "target": target, "first": test.first}
            results = session.measure(model, decided_by, range(options.depths), test.measure)
            depths = [PasskeyDepth(**each) for each in results]
            lengths.append(PasskeyLength(target=target, k_max=k_max(depths), depths=depths))
        several = {"lengths": lengths} if options.targets else {}
        return {**dict(lengths[-1]), **several, "seed": options.seed, "decoding": "greedy"}

    def metrics(self, scores: PasskeyScores) -> list[Metric]:
        """Return k_max and the share of keys that were retrieved, by length of context."""
        metrics = []
        for length in scores.by_length:
            trials = [
                Value(f"key {scores.seed}/{trial} at {depth.k} of {length.target}", float(outcome))
                for depth in length.depths
                for trial, outcome in enumerate(depth.outcomes or ())
            ]
            hub: Json = {"at": length.target, "dataset": f"passkey retrieval in {length.target} tokens"}
            metrics.append(Metric("k_max", length.k_max, "tokens", hub_name="k_max", **hub))
            if trials:
                mean = fmean(trial.value for trial in trials)
                metrics.append(
                    proportion("passkeys retrieved", mean, len(trials), values=trials, hub_name="accuracy", **hub)
                )
        return metrics

    def panels(self, scores: Mapping[str, PasskeyScores]) -> list[Panel]:
        """Return success by distance, and for a model in several lengths depth against length."""
        maps = [partial(_draw_map, label, each.lengths) for label, each in scores.items() if each.lengths]
        return [partial(_draw_distances, scores), *maps]


def _draw_distances(scores: Mapping[str, PasskeyScores], axes: Any) -> None:
    curves = {
        f"{label}: k_max {each.k_max:,}": [(depth.k, 100 * depth.success_rate) for depth in each.depths]
        for label, each in scores.items()
    }
    draw_curves(curves, axes, xlabel="distance of the passkey (tokens)", ylabel="retrieved (%)")
    required = f"required for k_max ({REQUIRED_SUCCESS:.0%})"
    axes.axhline(100 * REQUIRED_SUCCESS, color="0.55", linestyle="--", linewidth=1.2, label=required)
    axes.set_ylim(-4, 104)


def _draw_map(label: str, lengths: Sequence[PasskeyLength], axes: Any) -> None:
    """Draw depth, from the start of the text at the top, against length; every length is as wide as the others. The
    colours go from red to blue, which the color-blind tell apart.
    """
    columns = ([depth.success_rate for depth in reversed(length.depths)] for length in lengths)
    rows = [*zip(*columns, strict=True)]
    drawn = axes.imshow(rows, aspect="auto", extent=(0, len(lengths), 100, 0), cmap="RdYlBu", vmin=0, vmax=1)
    axes.set_xticks([index + 0.5 for index in range(len(lengths))], [f"{length.target:,}" for length in lengths])
    axes.set(xlabel="length (tokens)", ylabel="depth of the passkey (%)")
    axes.figure.colorbar(drawn, ax=axes, label=f"share retrieved by {label}")


class Trial(NamedTuple):
    """Token ids of a prompt and its answer; `distance` in tokens from the first digit of the key to the end of both,
    which have `length` tokens together.
    """

    prompt: list[int]
    answer: list[int]
    distance: int
    length: int


def distances(target: int, depths: int) -> list[int]:
    """Return so many distances in tokens, spaced evenly to `target`, the nearest first.

    >>> distances(8192, 32)[:3], distances(8192, 32)[-1]
    ([256, 512, 768], 8192)
    """
    return [round(target * (index + 1) / depths) for index in range(depths)]


def prompt(key: str, before: int, after: int) -> str:
    """Return the paper's prompt (figure 3) with the filler `before` and `after` times around the key."""
    parts = (HEADER, " ".join([FILLER] * before), STATEMENT.format(key=key), " ".join([FILLER] * after), QUESTION)
    return "\n".join(part for part in parts if part)


def make_trial(tokenizer: Any, target: int, k: int, key: str) -> Trial:
    """Return a trial of `target` tokens to within one filler, the key about `k` tokens from the end."""
    bare = _trial(tokenizer, key, 0, 0)
    filler = _trial(tokenizer, key, 1, 2).length - _trial(tokenizer, key, 1, 1).length
    fillers = (target - bare.length) // filler
    if fillers < 0:
        raise DataError(
            f"--target: {target} tokens do not hold the passkey prompt, which needs {bare.length}; choose a longer one"
        )
    wanted = max(0, round((k - bare.distance) / filler))
    # Where a line begins, a filler may take more tokens than inside it: one filler fewer may be needed.
    while True:
        after = min(fillers, wanted)
        trial = _trial(tokenizer, key, fillers - after, after)
        if trial.length <= target or fillers == 0:
            return trial
        fillers -= 1


def _trial(tokenizer: Any, key: str, before: int, after: int) -> Trial:
    text = prompt(key, before, after)
    at, prompt_ids = text.index(key), _ids(tokenizer, text)
    # Encoded together and then split: a tokenizer may treat the blank before the digits as it likes.
    whole = f"{text} {key}"
    ids = _ids(tokenizer, whole)
    # Slow tokenizers do not say where their tokens are.
    digits = (
        tokenizer(whole, verbose=False).char_to_token(at)
        if tokenizer.is_fast
        else len(_ids(tokenizer, text[:at].rstrip()))
    )
    return Trial(prompt_ids, ids[len(prompt_ids) :], len(ids) - digits, len(ids))


def _ids(tokenizer: Any, text: str) -> Any:
    return without_end(tokenizer, tokenizer(text, verbose=False)["input_ids"])


class PasskeyTest:
    """Runs random keys at several distances up to `target` tokens. One forward pass over prompt and answer decides a
    trial: each digit must be the first choice given those before it, as greedy decoding gives them. Text ahead of the
    key is computed once where that pays and has room.
    """

    def __init__(self, loaded: Model, target: int, options: PasskeyOptions) -> None:
        self.loaded, self.target = loaded, target
        self.ks = distances(target, options.depths)
        rng = random.Random(options.seed)
        self.keys = [["".join(rng.choices("0123456789", k=DIGITS)) for _ in range(options.trials)] for _ in self.ks]
        self.first = self.trials(0)[0]

    def trials(self, depth: int) -> list[Trial]:
        """Return the trials at one depth; raise DataError if a prompt does not fit."""
        return [make_trial(self.loaded.tokenizer, self.target, self.ks[depth], key) for key in self.keys[depth]]

    def measure(self, depth: int) -> Json:
        """Return how the trials at one depth end: the fields of PasskeyDepth."""
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
        """The text ahead of the key where it stands nearest to the end: the longest. Computing it costs one
        prompt; a trial then saves half a prompt on average.
        """
        if depends_on_length(self.loaded.config):
            return None
        ahead = self.first.prompt[: self.first.length - self.first.distance]
        return shared_prefix(self.loaded.model, ahead, self.target)

    def _succeeds(self, trial: Trial) -> bool:
        forget_lengths(self.loaded)
        # The last digit predicts nothing that is asked for.
        ids = [*trial.prompt, *trial.answer[:-1]]
        logits = last_logits(self.loaded.model, ids, len(trial.answer), self._prefix)
        check_numbers(self.loaded, finite(logits))
        return bool(logits.argmax(-1).tolist() == trial.answer)


def k_max(depths: Sequence[PasskeyDepth]) -> int:
    """Return the largest k such that every k' <= k succeeds at least 20 % of the time; 0 if the nearest does not."""
    return longest_passing({depth.k: depth.success_rate for depth in depths}, REQUIRED_SUCCESS)
