"""RULER as a measurement: scores, metrics, and the picture."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from pi_lora.drawing import STYLES
from pi_lora.evaluation.benchmarks.scores import check_packages
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.measurement import Measurement
from pi_lora.evaluation.metrics import Metric, Value, share_of_samples
from pi_lora.evaluation.ruler.scores import ALL_TASKS, PAPERS_THRESHOLD, RulerScores, RulerTask
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import RulerOptions, default_windows


class Ruler(Measurement[RulerOptions, RulerScores]):
    """RULER (Hsieh et al. 2024) through lm-eval."""

    name = "ruler"
    options = RulerOptions
    scores = RulerScores

    def prepare(self, options: RulerOptions, models: Sequence[Model]) -> RulerOptions:
        """Fill in the windows, by default L', L'/2, ... down to L, and the tasks, and find their texts."""
        check_packages("ruler", "lm_eval", "nltk", "wonderwords")
        from pi_lora.evaluation.ruler.prompts import TASKS, find_texts

        original = min(round(model.window / model.scale) for model in models)
        windows = options.windows or default_windows(max(model.window for model in models), original)
        tasks = options.tasks or TASKS
        find_texts(tasks)
        return options.changed(windows=tuple(sorted(windows)), tasks=tasks)

    def run(self, model: Model, options: RulerOptions, session: Session) -> RulerScores:
        """Measure a model."""
        from pi_lora.evaluation.ruler.measure import evaluate_ruler

        return evaluate_ruler(model, self.prepare(options, [model]), session)

    def metrics(self, scores: RulerScores) -> list[Metric]:
        """Return the mean of the tasks and each task by window, and the effective length."""
        means, details = [], []
        for length in scores.lengths:
            values = [value for task, each in length.tasks.items() for value in _values(scores, task, each)]
            about = f"RULER, {len(length.tasks)} tasks at {length.window} tokens"
            hub: dict[str, Any] = {"dataset": about, "hub_name": "score"}
            samples = sum(each.samples for each in length.tasks.values())
            means.append(share_of_samples("RULER", length.score, samples, values=values, at=length.window, **hub))
            for task, each in length.tasks.items():
                details.append(share_of_samples(task, each.score, each.samples, at=length.window))
        label = f"effective length ({PAPERS_THRESHOLD:.1%}, {len(scores.lengths[0].tasks)} of {ALL_TASKS} tasks)"
        reached = Metric(label, scores.effective_length, "tokens", dataset="RULER", hub_name="effective length")
        return [*means, *details, reached]

    def about(self, scores: Sequence[RulerScores]) -> str:
        """Return the number of tasks and samples, and the form of the prompts."""
        first, options = scores[0], scores[0].options or RulerOptions()
        template = "chat template" if options.chat_template else "no chat template"
        samples = f"{options.samples} samples a task and window, seed {options.seed}"
        return f"{len(first.lengths[0].tasks)} of {ALL_TASKS} tasks; {samples}; {template}, lm-eval {first.lm_eval}"

    def draw(self, axes: Any, scores: Mapping[str, RulerScores]) -> None:
        """Draw the mean of the tasks by window, with the threshold of the effective length."""
        for (label, each), (colour, marker) in zip(scores.items(), cycle(STYLES), strict=False):
            points = [(length.window, 100 * length.score) for length in each.lengths]
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, label=label)
        axes.axhline(100 * PAPERS_THRESHOLD, color="0.55", linestyle=":", linewidth=1.2)
        windows = sorted({length.window for each in scores.values() for length in each.lengths})
        axes.set(xscale="log", ylim=(-4, 104), xlabel="window (tokens)", ylabel="RULER, mean of the tasks (%)")
        axes.set_xticks(windows, [f"{window:,}" for window in windows])
        axes.minorticks_off()


def _values(scores: RulerScores, task: str, each: RulerTask) -> list[Value]:
    name = f"{task} {scores.options.seed if scores.options else 0} of {each.length} tokens"
    return [Value(f"{name}: {number}", value, group=task) for number, value in enumerate(each.outcomes or ())]
