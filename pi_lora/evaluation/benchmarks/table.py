"""Benchmark scores as a table: a model a row, as in the paper's table 5."""

from rich.table import Table

from pi_lora.evaluation.benchmarks.local_data import SCHEMAS
from pi_lora.types import Json


def benchmarks_table(*models: Json) -> Table:
    """Accuracy in percent with its standard error, of models that were measured alike."""
    first = models[0]
    limit = f", first {first['limit']} of each" if first["limit"] else ""
    table = Table(title=f"zero-shot accuracy in %{limit}")
    table.add_column("model")
    table.add_column("scale", justify="right")
    for name in first["tasks"]:
        table.add_column(SCHEMAS[name].title, justify="right")
    for scores in models:
        cells = [_percent(score["acc"], score["stderr"]) for score in scores["tasks"].values()]
        table.add_row(scores["model"], f"{scores['scale']:g}", *cells)
    windows = "/".join(dict.fromkeys(str(scores["window"]) for scores in models))
    table.caption = f"window {windows}, {first['dtype']}, lm-eval {first['lm_eval']}, likelihoods not normalized"
    return table


def _percent(accuracy: float, stderr: float | None) -> str:
    return f"{100 * accuracy:.1f}" if stderr is None else f"{100 * accuracy:.1f} ± {100 * stderr:.1f}"
