"""Write the tables of docs/, of the README, and benchmarks/README.md, from benchmarks/results/.

python benchmarks/tables.py
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import record  # first: it finds scripts/
import tables_gpu
import tables_smollm2
from figures import index
from pages import machines_of, made_on, mean_and_range, table, write_block

from pi_lora.evaluation.intervals import wilson
from pi_lora.evaluation.suite import MEASUREMENTS
from pi_lora.report.comparison import compare

HERE = Path(__file__).parent
DOCS = record.ROOT / "docs"
NOT_RUN = "Not run yet.\n"
MEASURED = ("perplexity", "passkey")

Result = Mapping[str, Any]
Lines = Iterator[str]


def text_of(name: str, write: Callable[[Result], Iterable[str]]) -> str:
    """The tables of a result, after the machine that all of it was measured on; or that there is none."""
    if not (result := record.read(name)):
        return NOT_RUN
    machine = [f"{made_on(result['machine'])}\n"] if "machine" in result else []
    return "\n".join([*machine, *write(result), ""])


def merge(result: Result) -> Lines:
    """A way of merging a row: seconds until all is on the disk, and the peak."""
    rows = [
        (way, f"{row['seconds']:.1f} s", f"{row['peak_bytes'] / 1e9:.2f} GB") for way, row in result["ways"].items()
    ]
    yield from table(("", "time", "peak memory"), rows)


def engines(result: Result) -> Lines:
    """For each case a table, an engine a row: the verdicts of check-server on both prompts."""
    for case, rows in result["cases"].items():
        lengths = next(([each["tokens"] for each in row["verdicts"]] for row in rows.values() if "verdicts" in row), [])
        yield f"`{case}`:\n"
        head = ("server", *(f"{tokens:,} tokens" for tokens in lengths), "day")
        yield from table(head, [engine_row(engine, row) for engine, row in rows.items()])
        yield ""
        yield from machines_of(rows)
        yield ""


def engine_row(engine: str, row: Result) -> tuple[object, ...]:
    """The cells of one engine."""
    name, day = engine.replace("_adapter", ", adapter on its base").replace("_", " "), row["machine"]["date"]
    if "failed" in row:
        return (name, f"**failed**: {row['failed'].replace('|', ' ')}", "", day)
    cells = []
    for said in row["verdicts"]:
        difference = "" if said["difference"] is None else f", {said['difference']:.1e} nats"
        cells.append(f"{said['verdict']}{difference}, {said['agreed']} equal tokens")
    return (f"{name} ({row['version']})", *cells, day)


def probe(result: Result) -> Lines:
    """For each target a table of the untuned scalings, as `pi-lora probe --json` has them; then the sample."""
    for reach in result["targets"]:
        rows = []
        for name, scores in reach["scalings"].items():
            perplexities = [f"{row['perplexity']:.2f}" for row in scores["perplexity"]["windows"]]
            rows.append((name, *perplexities, *retrieved(scores.get("passkey"))))
        yield f"{result['hardware']}; {', '.join(map(' '.join, result['versions'].items()))}.\n"
        windows = [f"perplexity at {window:,}" for window in (result["original"], reach["target"])]
        yield from table(("scaling", *windows, "passkeys", "k_max"), rows)
        read, keys = (next(each[name] for each in reach["scalings"].values() if name in each) for name in MEASURED)
        trials = sum(depth["trials"] for depth in keys["depths"])
        yield (
            f"\n{read['documents']} document{'s' * (read['documents'] > 1)} of {read['data']}, "
            f"stride {read['stride']:,}; {trials} passkeys, seed "
            f"{keys['seed']}; {read['dtype']}. `direct` is the base as it is. In the words of the probe: "
            f"{reach['summary']}."
        )


def retrieved(passkey: Result | None) -> tuple[str, str]:
    """The share of passkeys with its 95 % interval, and k_max."""
    if passkey is None:
        return "not asked", ""
    trials = sum(depth["trials"] for depth in passkey["depths"])
    share = sum(depth["trials"] * depth["success_rate"] for depth in passkey["depths"]) / trials
    low, high = wilson(share, trials)
    return f"{share:.0%} ({low:.0%} to {high:.0%})", f"{passkey['k_max']:,}"


def chats(_: Result) -> Lines:
    """A metric a row: without tuning, tuned on novels, and on novels with chats."""
    rows: dict[str, dict[str, str]] = {}
    for file in sorted((record.RESULTS / "chats").glob("*.json")):
        content = record.read(f"chats/{file.stem}")
        for result in content if isinstance(content, list) else [content]:
            measurement = MEASUREMENTS[result["measurement"]]
            for metric in measurement.metrics(measurement.scores.model_validate(result)):
                if not metric.is_detail:
                    rows.setdefault(metric.heading, {})[result["model"]] = metric.text
    models = dict.fromkeys(model for cells in rows.values() for model in cells)
    head = ("", *(Path(model).name for model in models))
    yield from table(
        head, [(name, *(cells.get(model, "not asked") for model in models)) for name, cells in rows.items()]
    )
    yield "\nWith chats beside without, paired, 95 %:\n"
    for name in ("chat", "perplexity"):
        for row in compare(*map(MEASUREMENTS[name].scores.model_validate, record.read(f"chats/{name}-tuned"))):
            if row.interval:
                low, high = row.interval
                yield f"- {row.measurement}: {row.change:+.3f}{row.unit and f' {row.unit}'} ({low:+.3f} to {high:+.3f})"


def methods(result: Result) -> Lines:
    """A way of tuning a row, mean and range of its seeds; then how and on what the rows were measured."""
    windows = list(next(iter(result["rows"].values()))[0]["perplexity"])
    rows = []
    for name, runs in result["rows"].items():
        perplexities = (mean_and_range([run["perplexity"][window] for run in runs], ".2f") for window in windows)
        reached = mean_and_range([run["k_max"] for run in runs], ".0f")
        retrieved = mean_and_range([run["success_rate"] for run in runs], ".0%")
        rows.append((result["labels"][name], len(runs), *perplexities, reached, retrieved))
    yield from table(("method", "seeds", *(f"ppl {window}" for window in windows), "k_max", "passkeys"), rows)
    yield f"\n{result['steps']} steps each; {result['depths']} distances of {result['trials']} passkeys each."
    yield from machines_of({result["labels"][name]: runs[-1] for name, runs in result["rows"].items()})


def rates(result: Result) -> Lines:
    """Perplexity at the target, a learning rate a column."""
    rates = sorted({rate for runs in result["rates"].values() for rate in runs}, key=float)
    rows = [
        (
            result["labels"][name],
            *(f"{[*runs[rate]['perplexity'].values()][-1]:.2f}" if rate in runs else "" for rate in rates),
        )
        for name, runs in result["rates"].items()
    ]
    yield from table(("method", *rates), rows)


# Page, name of the block in it, name of the result, and what writes its tables.
BLOCKS: list[tuple[Path, str, str, Callable[[Result], Iterable[str]]]] = [
    (DOCS / "performance.md", "gpu", "gpu", tables_gpu.tables),
    (DOCS / "results.md", "smollm2", "smollm2_16k/machines", tables_smollm2.tables),
    (DOCS / "experiments.md", "validation", "smollm2_16k/perplexity-validation-tuned-yarn", tables_smollm2.validation),
    (DOCS / "results.md", "probe_builtin", "probe_builtin", probe),
    (DOCS / "results.md", "probe_smollm2", "probe_smollm2", probe),
    (DOCS / "results.md", "chats", "chats/chat-tuned", chats),
    (DOCS / "results.md", "methods", "methods", methods),
    (DOCS / "experiments.md", "rates", "methods", rates),
    (DOCS / "engines.md", "engines", "engines", engines),
    (DOCS / "merging.md", "merge", "merge", merge),
    (record.ROOT / "README.md", "smollm2", "smollm2_16k/machines", tables_smollm2.readme),
]


def write_pages() -> None:
    """Write every page and block, and the picture of SmolLM2."""
    (HERE / "README.md").write_text(index(), encoding="utf-8")
    for place, name, script, write in BLOCKS:
        write_block(place, name, text_of(script, write))
    tables_smollm2.picture(DOCS / "smollm2.png")


if __name__ == "__main__":
    write_pages()
