"""The scores of one model, or of several side by side, as a table."""

from collections.abc import Sequence

from rich.table import Table

from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.registry import MEASUREMENTS


def scores_table(scores: Sequence[Scores]) -> Table:
    """Return a row for each metric and a column for each model, with the number of samples; all of one measurement."""
    measurement, alone = MEASUREMENTS[scores[0].measurement], len(scores) == 1
    columns = [{metric.heading: metric for metric in measurement.metrics(one)} for one in scores]
    table = Table("", title=f"{scores[0].model}: {measurement.name}" if alone else measurement.name)
    for one in scores:
        table.add_column("value" if alone else one.model, justify="right", overflow="fold")
    table.add_column("samples", justify="right")
    for heading in dict.fromkeys(heading for column in columns for heading in column):
        row = [column.get(heading) for column in columns]
        samples = dict.fromkeys(f"{each.samples:,}" for each in row if each and each.samples)
        table.add_row(heading, *(each.text if each else "" for each in row), " / ".join(samples))
    scales = " / ".join(f"{one.scale:g}" for one in scores)
    dtypes = ", ".join(dict.fromkeys(str(one.dtype) for one in scores))
    table.caption = f"scale {scales}, {dtypes}, {measurement.about(scores)}"
    if any(metric.interval for column in columns for metric in column.values()):
        table.caption += "; 95 % intervals"
    return table
