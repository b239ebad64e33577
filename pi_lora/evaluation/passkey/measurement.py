"""Passkey retrieval as a measurement: its scores, their metrics and their picture."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from pi_lora.drawing import STYLES
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.measurement import Measurement
from pi_lora.evaluation.metrics import Metric, Value, share, share_of_samples
from pi_lora.evaluation.passkey.scores import PasskeyLength, PasskeyScores
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import PasskeyOptions

# From red to blue, which the color-blind tell apart.
COLOURS: Any = {"cmap": "RdYlBu", "vmin": 0, "vmax": 1}


class Passkey(Measurement[PasskeyOptions, PasskeyScores]):
    """Passkey retrieval (paper, section 3.3)."""

    name = "passkey"
    options = PasskeyOptions
    scores = PasskeyScores

    def prepare(self, options: PasskeyOptions, models: Sequence[Model]) -> PasskeyOptions:
        """Fill in the target: the longest window."""
        if options.target or options.targets:
            return options
        return options.changed(target=max(model.window for model in models))

    def run(self, model: Model, options: PasskeyOptions, session: Session) -> PasskeyScores:
        """Measure a model."""
        from pi_lora.evaluation.passkey.measure import evaluate_passkey

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
            if trials and not scores.options.k_max_only:
                metrics.append(share("passkeys retrieved", trials, hub_name="accuracy", **hub))
        for depth in [] if scores.lengths else scores.depths:
            metrics.append(share_of_samples("retrieved at distance", depth.success_rate, depth.trials, at=depth.k))
        return metrics

    def about(self, scores: Sequence[PasskeyScores]) -> str:
        """Return how many trials there were."""
        options = scores[0].options
        trials = f"{'at most ' * options.k_max_only}{options.trials} trials at each of {options.depths} depths"
        return f"{trials}, seed {options.seed}, greedy decoding"

    def draw(self, axes: Any, scores: Mapping[str, PasskeyScores]) -> None:
        """Draw success by distance; of one model in several lengths depth against length."""
        [first, *others] = scores.values()
        if first.lengths and not others:
            _draw_map(axes, first.lengths)
            return
        for (label, each), (colour, marker) in zip(scores.items(), cycle(STYLES), strict=False):
            points = [(depth.k, 100 * depth.success_rate) for depth in each.depths]
            name = f"{label}: k_max {each.k_max:,}"
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, label=name)
        axes.set(xlabel="distance of the passkey (tokens)", ylabel="retrieved (%)", ylim=(-4, 104))


def _draw_map(axes: Any, lengths: Sequence[PasskeyLength]) -> None:
    """Draw depth, from the start of the text at the top, against length; every length is as wide as the others."""
    depths = len(lengths[0].depths)
    edges = [100 - 100 * index / depths for index in range(depths + 1)]
    rates = zip(*([depth.success_rate for depth in length.depths] for length in lengths), strict=True)
    drawn = axes.pcolormesh(range(len(lengths) + 1), edges, list(rates), **COLOURS)
    axes.set_xticks([index + 0.5 for index in range(len(lengths))], [f"{length.target:,}" for length in lengths])
    axes.set(xlabel="length (tokens)", ylabel="depth of the passkey (%)", ylim=(100, 0))
    axes.figure.colorbar(drawn, ax=axes, label="retrieved", format=lambda part, _: f"{part:.0%}")
