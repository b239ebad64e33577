"""RULER as a measurement: its scores, their metrics and their picture."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from pi_lora.drawing import STYLES
from pi_lora.evaluation.benchmarks.scores import check_has_lm_eval
from pi_lora.evaluation.journal import Session
from pi_lora.evaluation.measurement import Measurement
from pi_lora.evaluation.metrics import Metric, Value, share_of_samples
from pi_lora.evaluation.ruler.scores import (
    ALL_TASKS,
    PAPERS_THRESHOLD,
    SHARE_OF_BASE,
    RulerScores,
    RulerTask,
)
from pi_lora.models.model import Model
from pi_lora.recipe.evaluation import RulerOptions, default_windows


class Ruler(Measurement[RulerOptions, RulerScores]):
    """RULER (Hsieh et al. 2024) through lm-eval."""

    name = "ruler"
    options = RulerOptions
    scores = RulerScores

    def prepare(self, options: RulerOptions, models: Sequence[Model]) -> RulerOptions:
        """Fill in the windows, by default L', L'/2, ... down to L, and find the texts of the tasks."""
        check_has_lm_eval("ruler")
        from pi_lora.evaluation.ruler.prompts import TASKS, unavailable

        unavailable(options.tasks or TASKS)
        original = min(round(model.window / model.scale) for model in models)
        windows = options.windows or default_windows(max(model.window for model in models), original)
        return options.changed(windows=tuple(sorted(windows)))

    def run(self, model: Model, options: RulerOptions, session: Session) -> RulerScores:
        """Measure a model."""
        from pi_lora.evaluation.ruler.measure import evaluate_ruler
        from pi_lora.evaluation.ruler.prompts import TASKS, unavailable

        left_out = unavailable(options.tasks or TASKS)
        for task, reason in left_out.items():
            session.say(f"{task}: left out: {reason}")
        return evaluate_ruler(model, self.prepare(options, [model]), left_out, session)

    def metrics(self, scores: RulerScores) -> list[Metric]:
        """Return the mean of the tasks and each task by window, and the effective lengths over all tasks."""
        metrics = []
        for length in scores.lengths:
            by_task = {task: _values(scores, task, each) for task, each in length.tasks.items()}
            values = [value for each in by_task.values() for value in each]
            about = f"RULER, {len(length.tasks)} tasks at {length.window} tokens"
            others: dict[str, Any] = {"at": length.window, "dataset": about, "hub_name": "score"}
            samples = sum(each.samples for each in length.tasks.values())
            metrics.append(share_of_samples("mean", length.score, samples, values=values, **others))
        for length in scores.lengths:
            for task, each in length.tasks.items():
                metrics.append(share_of_samples(task, each.score, each.samples, at=length.window))
        tasks = len(scores.lengths[0].tasks)
        label = f"effective length ({PAPERS_THRESHOLD:.1%}, {tasks} of {ALL_TASKS} tasks)"
        reached = Metric(label, scores.effective_length, "tokens", dataset="RULER", hub_name="effective length")
        metrics.append(reached)
        if scores.relative:
            label = f"effective length ({SHARE_OF_BASE:.0%} of the base, {tasks} of {ALL_TASKS} tasks)"
            metrics.append(replace(reached, label=label, value=scores.relative.effective_length))
        return metrics

    def about(self, scores: Sequence[RulerScores]) -> str:
        """Return the number of tasks and samples, and how prompts were put."""
        first = scores[0]
        tasks = len(first.lengths[0].tasks)
        left_out = f", left out for want of text: {', '.join(first.left_out)}" if first.left_out else ""
        template = "chat template" if first.chat_template else "no chat template"
        each = f"{first.samples} samples a task and window, seed {first.seed}"
        return f"{tasks} of {ALL_TASKS} tasks{left_out}; {each}; {template}, lm-eval {first.lm_eval}"

    def relate(self, base: RulerScores, scores: RulerScores) -> RulerScores:
        """Add the effective length by 95 % of what the base reaches in its own window."""
        from pi_lora.evaluation.ruler.effective import relative_to

        return relative_to(base, scores)

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
    name = f"{task} {scores.seed} of {each.length} tokens"
    return [Value(f"{name}: {number}", value, group=task) for number, value in enumerate(each.outcomes or ())]
