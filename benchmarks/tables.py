"""Write the tables of docs/, of the README, and benchmarks/README.md, from benchmarks/results/.

python benchmarks/tables.py
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import record  # first: it finds scripts/
import search
import tables_context
import tables_gpu
import tables_smollm2
from figures import index
from pages import machines_of, made_on, mean_and_range, table, write_block
from pi_lora.evaluation.probe import Probe, Probed
from pi_lora.evaluation.suite import MEASUREMENTS, metrics_of, setting_of
from pi_lora.report.comparison import compare
from record import parser_of

HERE = Path(__file__).parent
DOCS = record.ROOT / "docs"
NOT_RUN = "Not run yet.\n"

Result = Mapping[str, Any]
Lines = Iterator[str]


def text_of(name: str, write: Callable[[Result], Iterable[str]]) -> str:
    """The tables of a result, below the machine if one machine measured all of it; or a line that it was not run."""
    result = record.read(name)
    if not result:
        return NOT_RUN
    lines = []
    if "machine" in result:
        lines.append(f"{made_on(result['machine'])}\n")
    lines.extend(write(result))
    return "\n".join([*lines, ""])


def merge(result: Result) -> Lines:
    """A way of merging a row: seconds until all is on the disk, and the peak."""
    rows = []
    for way, row in result["ways"].items():
        seconds = f"{row['seconds']:.1f} s"
        peak = f"{row['peak_bytes'] / 1e9:.2f} GB"
        rows.append((way, seconds, peak))
    yield from table(("", "time", "peak memory"), rows)


def attention(result: Result) -> Lines:
    """A job a row: seconds and peak of both kernels, where both ran."""
    rows = []
    for row in result["rows"].values():
        costs = []
        for kernel in ("sdpa", "auto"):
            cost = row.get(kernel)
            costs.append(f"{cost['seconds']:.1f} s, {cost['peak_bytes'] / 1e9:.1f} GB" if cost else "")
        tokens = f"{row['tokens']:,}"
        faster = f"{row['times_as_fast']:.1f}" if "sdpa" in row else ""
        rows.append((row["name"], tokens, row["dtype"], *costs, faster))
    yield from table(("", "tokens", "dtype", "`sdpa`", "`auto`", "times as fast"), rows)
    yield ""
    yield from machines_of(result["rows"])


def plan_memory(result: Result) -> Lines:
    """A training a row: the bytes of tensors by the plan and by the simulation, and the peak of the process."""
    head = ("", "method", "tokens", "planned tensors", "simulated", "planned operations", "planned peak", "measured")
    rows = []
    for name, row in {**result["recipes"], **result["chosen"], **result["rows"]}.items():
        tensors = row["planned_tensors"] / row["simulated_tensors"] - 1
        operations = row["planned_flops"] / row["simulated_flops"] - 1
        rows.append(
            (
                name,
                f"{row['method']}, {row['device']}",
                f"{row['tokens']:,}",
                f"{gib(row['planned_tensors'])} ({tensors:+.1%})",
                gib(row["simulated_tensors"]),
                f"{operations:+.1%}",
                gib(row["planned"]),
                gib(row["measured"]) if "measured" in row else "",
            )
        )
    yield from table(head, rows)


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"


def engines(result: Result) -> Lines:
    """For each case a table, an engine a row: the verdicts of check-server on its prompts."""
    for case, rows in result["cases"].items():
        yield f"`{case}`:\n"
        cells = [engine_row(engine, row) for engine, row in rows.items()]
        yield from table(("server", *prompt_names(rows), "day"), cells)
        yield ""
        yield from machines_of(rows)
        yield ""


def prompt_names(rows: Mapping[str, Result]) -> list[str]:
    """The lengths of the prompts, and where the codes stand, as the first engine that answered has them. Results of
    prompts without codes have no depth.
    """
    verdicts = next((row["verdicts"] for row in rows.values() if "verdicts" in row), ())
    names = []
    for verdict in verdicts:
        name = f"{verdict['tokens']:,} tokens"
        if "depth" in verdict:
            name += f", code at {verdict['depth']} %"
        names.append(name)
    return names


def engine_row(engine: str, row: Result) -> tuple[object, ...]:
    """The cells of one engine."""
    name = engine.replace("_adapter", ", adapter on its base").replace("_", " ")
    day = row["machine"]["date"]
    if "failed" in row:
        reason = row["failed"].replace("|", " ")
        return (name, f"**failed**: {reason}", "", day)
    verdicts = [verdict_text(verdict) for verdict in row["verdicts"]]
    return (f"{name} ({row['version']})", *verdicts, day)


def verdict_text(verdict: Result) -> str:
    """The verdict on one prompt, with the difference of log-probabilities where the server tells them."""
    difference = verdict["difference"]
    nats = "" if difference is None else f", {difference:.1e} nats"
    return f"{verdict['verdict']}{nats}, {verdict['agreed']} equal tokens"


def probe(result: Result) -> Lines:
    """For each target a table of the untuned scalings, from a file of `pi-lora probe --json`; then the sample."""
    probed = Probe.model_validate(result)
    versions = ", ".join(f"{library} {version}" for library, version in probed.versions.items())
    for target in probed.targets:
        yield f"{probed.hardware}; {versions}.\n"
        windows = [f"perplexity at {window:,}" for window in (probed.original, target.target)]
        rows = [probe_row(name, scaling) for name, scaling in target.scalings.items()]
        yield from table(("scaling", *windows, "k_max", "passkeys"), rows)
        best = target.scalings[target.best]
        settings = "; ".join(setting_of(scores) for scores in best.scores)
        yield f"\nMeasured with {settings}; {best.perplexity.dtype}."
        yield f"`direct` is the base as it is. In the words of the probe: {target.summary}."


def probe_row(name: str, scaling: Probed) -> tuple[str, ...]:
    """The cells of one scaling."""
    perplexities = [f"{metric.value:.2f}" for metric in scaling.windows]
    passkeys = ["", "not asked"]
    if scaling.passkey:
        passkeys = [metric.text for metric in metrics_of(scaling.passkey)]
    return (name, *perplexities, *passkeys)


def chats(_: Result) -> Lines:
    """A metric a row: without tuning, tuned on novels, and on novels with chats."""
    texts = chat_metrics()
    models = dict.fromkeys(model for cells in texts.values() for model in cells)
    rows = []
    for metric, cells in texts.items():
        row = [cells.get(model, "not asked") for model in models]
        rows.append((metric, *row))
    names = [Path(model).name for model in models]
    yield from table(("", *names), rows)
    yield "\nWith chats beside without, paired, 95 %:\n"
    for measurement in ("chat", "perplexity"):
        yield from chat_changes(measurement)


def chat_metrics() -> dict[str, dict[str, str]]:
    """The text of each metric by its heading and by model."""
    texts: dict[str, dict[str, str]] = {}
    for file in sorted((record.RESULTS / "chats").glob("*.json")):
        for result in record.read_scores(f"chats/{file.stem}"):
            measurement = MEASUREMENTS[result["measurement"]]
            scores = measurement.scores.model_validate(result)
            for metric in measurement.metrics(scores):
                if metric.hub_name:
                    texts.setdefault(metric.heading, {})[result["model"]] = metric.text
    return texts


def chat_changes(measurement: str) -> Lines:
    """The paired changes from novels alone to novels with chats that have an interval."""
    validate = MEASUREMENTS[measurement].scores.model_validate
    novels, novels_and_chats = record.read_scores(f"chats/{measurement}-tuned")
    for row in compare(validate(novels), validate(novels_and_chats)):
        if row.interval:
            low, high = row.interval
            change = f"{row.change:+.3f} {row.unit}".rstrip()
            yield f"- {row.measurement}: {change} ({low:+.3f} to {high:+.3f})"


def methods(result: Result) -> Lines:
    """A way of tuning a row, mean and range of its seeds; then how and on what the rows were measured."""
    first_runs = next(iter(result["rows"].values()))
    windows = list(first_runs[0]["perplexity"])
    rows = []
    machines = {}
    for name, runs in result["rows"].items():
        label = result["labels"][name]
        perplexities = [mean_and_range([run["perplexity"][window] for run in runs], ".2f") for window in windows]
        k_max = mean_and_range([run["k_max"] for run in runs], ".0f")
        passkeys = mean_and_range([run["success_rate"] for run in runs], ".0%")
        rows.append((label, len(runs), *perplexities, k_max, passkeys))
        machines[label] = runs[-1]
    headings = [f"ppl {window}" for window in windows]
    yield from table(("method", "seeds", *headings, "k_max", "passkeys"), rows)
    yield f"\n{result['steps']} steps each; {result['depths']} distances of {result['trials']} passkeys each."
    yield from machines_of(machines)


def rates(result: Result) -> Lines:
    """Perplexity at the target, a learning rate a column."""
    tried = {rate for runs in result["rates"].values() for rate in runs}
    rates = sorted(tried, key=float)
    rows = []
    for name, runs in result["rates"].items():
        cells = [perplexity_at_target(runs.get(rate)) for rate in rates]
        rows.append((result["labels"][name], *cells))
    yield from table(("method", *rates), rows)


def perplexity_at_target(run: Result | None) -> str:
    """The perplexity of the longest window; empty if the rate was not tried."""
    if run is None:
        return ""
    *_, perplexity = run["perplexity"].values()
    return f"{perplexity:.2f}"


# Page, name of the block in it, name of the result, and what writes its tables.
BLOCKS: list[tuple[Path, str, str, Callable[[Result], Iterable[str]]]] = [
    (DOCS / "performance.md", "gpu", "gpu", tables_gpu.tables),
    (DOCS / "performance.md", "attention", "attention", attention),
    (DOCS / "performance.md", "plan_memory", "plan_memory", plan_memory),
    (DOCS / "results.md", "smollm2", "smollm2_16k/machines", tables_smollm2.tables),
    (DOCS / "experiments.md", "validation", "smollm2_16k/perplexity-validation-tuned-yarn", tables_smollm2.validation),
    (DOCS / "results.md", "probe_builtin", "probe_builtin", probe),
    (DOCS / "results.md", "probe_smollm2", "probe_smollm2", probe),
    (DOCS / "results.md", "search", "search/builtin", search.tables),
    (DOCS / "results.md", "chats", "chats/chat-tuned", chats),
    (DOCS / "results.md", "methods", "methods", methods),
    (DOCS / "experiments.md", "rates", "methods", rates),
    (DOCS / "engines.md", "engines", "engines", engines),
    (DOCS / "merging.md", "merge", "merge", merge),
    (DOCS / "results.md", "use_context", "use_context/machines", tables_context.smollm2),
    (DOCS / "results.md", "gemma3_64k", "gemma3_64k/machines", tables_context.gemma3),
    (DOCS / "experiments.md", "whole_sequences", "use_context/machines", tables_context.validation),
    (record.ROOT / "README.md", "use_context", "use_context/machines", tables_context.readme),
]


def write_pages() -> None:
    """Write every page and block, and the picture of SmolLM2."""
    (HERE / "README.md").write_text(index(), encoding="utf-8")
    for page, block, result, write in BLOCKS:
        write_block(page, block, text_of(result, write))
    tables_smollm2.picture(DOCS / "smollm2.png")


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    write_pages()
