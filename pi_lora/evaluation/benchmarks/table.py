"""Benchmark scores as a table: a model a row, as in the paper's table 5."""

from rich.table import Table

from pi_lora.evaluation.results import BenchmarkScores, TaskScore

TITLES = {"boolq": "BoolQ", "piqa": "PIQA", "race_middle": "RACE-M", "race_high": "RACE-H", "winogrande": "WinoGrande"}


def benchmarks_table(*models: BenchmarkScores) -> Table:
    """Return accuracies in percent with their standard errors, of models that were measured alike."""
    first = models[0]
    limit = f", first {first.limit} of each" if first.limit else ""
    table = Table("model", title=f"accuracy in %{limit}")
    for heading in ("scale", *(heading_of(name, score) for name, score in first.tasks.items())):
        table.add_column(heading, justify="right")
    for scores in models:
        table.add_row(scores.model, f"{scores.scale:g}", *(_cell(score) for score in scores.tasks.values()))
    windows = "/".join(dict.fromkeys(str(scores.window) for scores in models))
    table.caption = f"window {windows}, {first.dtype}, lm-eval {first.lm_eval}, likelihoods not normalized"
    return table


def heading_of(name: str, score: TaskScore) -> str:
    """Return a task's title and its number of examples in the prompt.

    >>> heading_of("gsm8k", TaskScore(shots=5)), heading_of("boolq", TaskScore())
    ('gsm8k (5-shot)', 'BoolQ (0-shot)')
    """
    return f"{TITLES.get(name, name)} ({score.shots or 0}-shot)"


def _cell(score: TaskScore) -> str:
    """Accuracy in percent, or else each metric as lm-eval gives it."""
    if score.acc is None:
        values = {name: value for name, value in (score.metrics or {}).items() if "_stderr" not in name}
        return "\n".join(f"{name} {value:.4g}" for name, value in values.items())
    return f"{100 * score.acc:.1f}" + ("" if score.stderr is None else f" ± {100 * score.stderr:.1f}")
