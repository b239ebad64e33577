"""Passkey retrieval as a measurement: model and options in, typed scores out, with their metrics and their picture."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from pydantic import Field

from pi_lora.drawing import Panel, draw_curves
from pi_lora.evaluation.forward import check_ids, depends_on_length, described
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.measurement import Measurement, Result, Scores
from pi_lora.evaluation.metrics import Metric, Value, share, share_of_samples
from pi_lora.evaluation.passkey.prompt import Grid, trials_at
from pi_lora.evaluation.passkey.retrieval import REQUIRED_SUCCESS, PasskeyDepth, PasskeyTest, k_max, passkey_retrieval
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import PasskeyOptions
from pi_lora.types import Json

# Rows of the table with the share at a distance, evenly spaced; all distances are in the JSON.
MOST_ROWS = 8
# From red to blue, which the color-blind tell apart.
COLOURS: Any = {"cmap": "RdYlBu", "vmin": 0, "vmax": 1}


class PasskeyLength(Result):
    """Passkey retrieval over `target` tokens of context; `k_max` in tokens, depths from the nearest."""

    target: int
    k_max: int
    depths: list[PasskeyDepth]


class PasskeyScores(Scores):
    """Passkey retrieval over `target` tokens of context; of several `lengths`, `target` is the longest. `left_out` says
    which depths and how many trials were not needed to decide k_max.
    """

    measurement = "passkey"

    options: PasskeyOptions | None = None
    seed: int = 0
    decoding: str = "greedy"
    target: int
    k_max: int
    depths: list[PasskeyDepth]
    left_out: Json | None = None
    lengths: list[PasskeyLength] | None = Field(None, min_length=1)

    @property
    def by_length(self) -> Sequence["PasskeyLength | PasskeyScores"]:
        """Every length of context that was measured, the shortest first."""
        return self.lengths or [self]


class Passkey(Measurement[PasskeyOptions, PasskeyScores]):
    """Passkey retrieval (paper, section 3.3)."""

    name = "passkey"
    options = PasskeyOptions
    scores = PasskeyScores

    def prepare(self, options: PasskeyOptions, models: Sequence[Model]) -> PasskeyOptions:
        """Fill in the target: the longest window."""
        if options.longest:
            return options
        return options.changed(target=max(model.window for model in models))

    def run(self, model: Model, options: PasskeyOptions, session: Session) -> PasskeyScores:
        """Measure a model."""
        return evaluate_passkey(model, options, session)

    def metrics(self, scores: PasskeyScores) -> list[Metric]:
        """Return k_max and the share of keys that were retrieved, by length of context, and of one length by depth."""
        metrics = []
        for length in scores.by_length:
            trials = [
                Value(f"key {scores.seed}/{trial} at {depth.k} of {length.target}", float(outcome))
                for depth in length.depths
                for trial, outcome in enumerate(depth.outcomes or ())
            ]
            hub: dict[str, Any] = {"at": length.target, "dataset": f"passkey retrieval in {length.target} tokens"}
            metrics.append(Metric("k_max", length.k_max, "tokens", hub_name="k_max", **hub))
            if trials and scores.left_out is None:
                metrics.append(share("passkeys retrieved", trials, hub_name="accuracy", **hub))
        apart = -(-len(scores.depths) // MOST_ROWS)
        for depth in [] if scores.lengths else scores.depths[apart - 1 :: apart]:
            label = f"retrieved at distance {depth.k:,}"
            metrics.append(share_of_samples(label, depth.success_rate, depth.trials))
        return metrics

    def about(self, scores: Sequence[PasskeyScores]) -> str:
        """Return how many trials there were."""
        first = scores[0]
        options, how = first.options, f"seed {first.seed}, greedy decoding"
        if options is None:
            return how
        return f"{'at most ' * options.k_max_only}{options.trials} trials at each of {options.depths} depths, {how}"

    def panels(self, scores: Mapping[str, PasskeyScores]) -> list[Panel]:
        """Return success by distance, and for a model in several lengths depth against length."""
        maps = [partial(_draw_map, label, each.lengths) for label, each in scores.items() if each.lengths]
        return [partial(_draw_distances, scores), *maps]


def evaluate_passkey(model: Model, options: PasskeyOptions, session: Session | None = None) -> PasskeyScores:
    """Measure passkey retrieval over one or several lengths of context. If the session is shared, each process measures
    its share of the depths, and an interrupted evaluation continues when it is called again.
    """
    session = session or Session()
    targets = sorted(options.targets or [options.target or model.window])
    options = options if options.targets else options.changed(target=targets[0])
    grids = [Grid(target, options.depths, options.trials, options.seed) for target in targets]
    lengths = [_measure(model, grid, options.k_max_only, session) for grid in grids]
    longest = lengths[-1]
    several: Json = {"lengths": lengths} if options.targets else {}
    if options.k_max_only:
        trials = options.depths * options.trials - sum(depth.trials for depth in longest.depths)
        several["left_out"] = {"depths": grids[-1].ks[len(longest.depths) :], "trials": trials}
    return PasskeyScores(
        **described(model), **dict(longest), **several, options=options, seed=options.seed, decoding="greedy"
    )


def _measure(model: Model, grid: Grid, k_max_only: bool, session: Session) -> PasskeyLength:
    [first] = trials_at(model.tokenizer, grid, 0, range(1))
    check_ids(model, [*first.prompt, *first.answer])
    # The first trial tells what the tokenizer makes of the prompt.
    decided_by = {"passkey": {**asdict(grid), "k_max_only": k_max_only, "first": [first.prompt, first.answer]}}
    test = PasskeyTest(model.model, model.tokenizer, grid, depends_on_length(model.config), session.progress)
    depths = passkey_retrieval(test, k_max_only, session.journal(model, decided_by))
    return PasskeyLength(target=grid.target, k_max=k_max(depths), depths=depths)


def _draw_distances(scores: Mapping[str, PasskeyScores], axes: Any) -> None:
    curves = {
        f"{label}: k_max {each.k_max:,}": [(depth.k, 100 * depth.success_rate) for depth in each.depths]
        for label, each in scores.items()
    }
    draw_curves(axes, curves)
    axes.axhline(100 * REQUIRED_SUCCESS, color="0.55", linestyle="--", linewidth=1.2, label="required for k_max")
    axes.set(xlabel="distance of the passkey (tokens)", ylabel="retrieved (%)", ylim=(-4, 104))


def _draw_map(label: str, lengths: Sequence[PasskeyLength], axes: Any) -> None:
    """Draw depth, from the start of the text at the top, against length; every length is as wide as the others."""
    columns = ([depth.success_rate for depth in reversed(length.depths)] for length in lengths)
    drawn = axes.imshow([*zip(*columns, strict=True)], aspect="auto", extent=(0, len(lengths), 100, 0), **COLOURS)
    axes.set_xticks([index + 0.5 for index in range(len(lengths))], [f"{length.target:,}" for length in lengths])
    axes.set(xlabel="length (tokens)", ylabel="depth of the passkey (%)")
    axes.figure.colorbar(drawn, ax=axes, label=f"retrieved by {label}", format=lambda part, _: f"{part:.0%}")
