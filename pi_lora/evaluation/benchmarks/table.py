"""Benchmark scores as a table: a model a row, as in the paper's table 5."""

from rich.table import Table

from pi_lora.evaluation.benchmarks.local_data import TITLES
from pi_lora.evaluation.results import BenchmarkScores, TaskScore


def benchmarks_table(*models: BenchmarkScores) -> Table:
    """Return accuracies in percent with their standard errors, of models that were measured alike."""
    first = models[0]
    limit = f", first {first.limit} of each" if first.limit else ""
    zero_shot = "" if any(getattr(score, "shots", 0) for score in first.tasks.values()) else "zero-shot "
    table = Table("model", title=f"{zero_shot}accuracy in %{limit}")
    for heading in ("scale", *(TITLES.get(name, name) for name in first.tasks)):
        table.add_column(heading, justify="right")
    for scores in models:
        table.add_row(scores.model, f"{scores.scale:g}", *(_cell(score) for score in scores.tasks.values()))
    windows = "/".join(dict.fromkeys(str(scores.window) for scores in models))
    table.caption = f"window {windows}, {first.dtype}, lm-eval {first.lm_eval}, likelihoods not normalized"
    return table


def _cell(score: TaskScore) -> str:
    """Accuracy in percent, or else each metric as lm-eval gives it."""
    if score.acc is None:
        values = {name: value for name, value in (score.metrics or {}).items() if "_stderr" not in name}
        return "\n".join(f"{name} {value:.4g}" for name, value in values.items())
    return f"{100 * score.acc:.1f}" + ("" if score.stderr is None else f" ± {100 * score.stderr:.1f}")
