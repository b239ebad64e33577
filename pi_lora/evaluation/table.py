"""The scores of one model, or of several side by side, as a table."""

from collections.abc import Sequence

from rich.table import Table

from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.registry import MEASUREMENTS


def scores_table(scores: Sequence[Scores]) -> Table:
    """Return a row for each metric, by label and tokens, and a column for each model; all of one measurement."""
    first, measurement = scores[0], MEASUREMENTS[scores[0].measurement]
    columns = [{(each.label, each.at): each for each in measurement.metrics(one)} for one in scores]
    rows = {key: [column.get(key) for column in columns] for column in columns for key in column}
    samples = {key: {each.samples for each in row if each} for key, row in rows.items()}
    with_tokens = any(at is not None for _, at in rows)
    with_samples = all(len(numbers) == 1 for numbers in samples.values()) and any(map(any, samples.values()))

    table = Table(title=measurement.name if len(scores) > 1 else f"{first.model}: {measurement.name}")
    table.add_column("")
    for heading in ["tokens"] * with_tokens + ["value" if len(scores) == 1 else one.model for one in scores]:
        table.add_column(heading, justify="right", overflow="fold")
    if with_samples:
        table.add_column("samples", justify="right")
    for (label, at), row in rows.items():
        tokens = ["" if at is None else f"{at:,}"] * with_tokens
        [number] = samples[label, at] if with_samples else [None]
        cells = [each.text if each else "" for each in row]
        table.add_row(label, *tokens, *cells, *(["" if number is None else f"{number:,}"] * with_samples))
    scales = " / ".join(f"{one.scale:g}" for one in scores)
    dtypes = ", ".join(dict.fromkeys(str(one.dtype) for one in scores))
    table.caption = f"scale {scales}, {dtypes}, {measurement.about(scores)}"
    if any(each and each.interval for row in rows.values() for each in row):
        table.caption += "; 95 % intervals"
    return table
