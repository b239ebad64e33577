"""Write the tables of docs/, of the README and of benchmarks/README.md, from benchmarks/results/.

python benchmarks/tables.py
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import record  # first: it finds scripts/
import search
import tables_context
import tables_gpu
import tables_smollm2
from attention import KERNELS
from compare_methods import DEPTHS, METHODS, STEPS, TARGET, TRIALS, UNTUNED, WINDOWS
from pages import machines_of, made_on, mean_and_range, table, write_block
from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.probe import Probe
from pi_lora.evaluation.suite import setting_of
from pi_lora.report.comparison import compare
from pi_lora.serving.reference import MAX_NEW_TOKENS
from record import parser_of
from shown import changes_table, metrics_table, read_scores, retrieved

Result = Mapping[str, Any]
Lines = Iterator[str]


def text_of(write: Callable[[], Iterable[str]]) -> str:
    """The lines of a block."""
    return "\n".join([*write(), ""])


def merge() -> Lines:
    """A way of merging a row: seconds until all is on the disk, and the peak."""
    result = record.read("merge")
    yield f"{made_on(result['machine'])}\n"
    rows = []
    for way, row in result["ways"].items():
        rows.append((way, f"{row['seconds']:.1f} s", f"{row['peak_bytes'] / 1e9:.2f} GB"))
    yield from table(("", "time", "peak memory"), rows)


def speeds(name: str, key: str, heading: str) -> Lines:
    """A run a row: how fast it was."""
    runs = record.read(name)["runs"]
    rows = [(run, f"{row[key]:.3g}") for run, row in runs.items()]
    yield from table(("", heading), rows)
    yield ""
    yield from machines_of(runs)


def attention() -> Lines:
    """A job a row: seconds and peak of both kernels."""
    measured = record.read("attention")["rows"]
    rows = []
    for row in measured.values():
        costs = [f"{row[kernel]['seconds']:.1f} s, {row[kernel]['peak_bytes'] / 1e9:.1f} GB" for kernel in KERNELS]
        rows.append((row["name"], f"{row['tokens']:,}", row["dtype"], *costs, f"{row['times_as_fast']:.1f}"))
    yield from table(("", "tokens", "dtype", *(f"`{kernel}`" for kernel in KERNELS), "times as fast"), rows)
    yield ""
    yield from machines_of(measured)


def plan_memory() -> Lines:
    """A training a row: the bytes of tensors by the plan and by the simulation, and the peak of the process."""
    result = record.read("plan_memory")
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
    measured = result["rows"]
    off = [row["planned"] / row["measured"] - 1 for row in measured.values()]
    yield f"\n{len(off)} trainings: {min(off):+.0%} to {max(off):+.0%} vs. the measured memory."
    yield from machines_of(measured)


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"


def engines() -> Lines:
    """A rope a row, a server a column."""
    cases = record.read("engines")["cases"]
    rows = [(f"`{case}`", *map(server_text, by_server.values())) for case, by_server in cases.items()]
    first, *_ = cases.values()
    yield from table(("rope", *first), rows)
    yield ""
    yield from machines_of(first)


def server_text(row: Result) -> str:
    """Whether a server computes a model: the largest distance of a prompt if all tokens are equal."""
    if "failed" in row:
        return f"cannot: {row['failed']}"
    agreed = min(verdict["agreed"] for verdict in row["verdicts"])
    if agreed < MAX_NEW_TOKENS:
        return f"**differs**: {agreed} equal tokens"
    distance = max(verdict["difference"] for verdict in row["verdicts"])
    return f"{distance:.0e}"


def probe(name: str) -> Lines:
    """The untuned scalings, from a file of `pi-lora probe --json`; then the sample."""
    probed = Probe.model_validate(record.read(name))
    [target] = probed.targets
    yield from metrics_table({scaling: scores.scores for scaling, scores in target.scalings.items()})
    best = target.scalings[target.best]
    settings = "; ".join(setting_of(scores) for scores in best.scores)
    yield f"\nMeasured with {settings}; {best.perplexity.dtype}."
    yield f"`direct` is the base as it is. In the words of the probe: {target.summary}."
    versions = ", ".join(f"{library} {version}" for library, version in probed.versions.items())
    yield f"{probed.hardware}; {versions}."


def by_model(files: Iterable[str]) -> dict[str, list[Scores]]:
    """The scores in files, a model a column."""
    columns: dict[str, list[Scores]] = {}
    for file in files:
        for scores in read_scores(file):
            columns.setdefault(Path(scores.model).name, []).append(scores)
    return columns


def demo_seeds() -> Lines:
    """Three seeds of the demo."""
    files = [f"demo/{name}-{seed}" for name in ("perplexity", "passkey") for seed in range(3)]
    yield from metrics_table(by_model(files))


def chats() -> Lines:
    """Without tuning, tuned on novels, and on novels with chats."""
    files = sorted((record.RESULTS / "chats").glob("*.json"))
    yield from metrics_table(by_model(f"chats/{file.stem}" for file in files))
    yield "\nWith chats (run) vs. without (base), paired, 95 %:\n"
    rows = [
        row for measurement in ("chat", "perplexity") for row in compare(*read_scores(f"chats/{measurement}-tuned"))
    ]
    yield from changes_table("", rows)


def chat_template() -> Lines:
    """Passkeys asked as raw text and in the chat template: of the base by window, of untuned scalings by a probe."""
    ways = {"false": "as raw text", "true": "in the chat template"}
    rows = []
    for window in (2048, 4096, 8192):
        rows.append((f"base, {window:,} tokens", *(retrieved(f"chat_template/{window}-{chat}") for chat in ways)))
    by_way = [Probe.model_validate(record.read(f"chat_template/probe-{chat}")).targets[0] for chat in ways]
    for scaling in by_way[0].scalings:
        passkeys = [probed.scalings[scaling].retrieved for probed in by_way]
        if any(passkeys):
            cells = [metric.text if metric else "not asked" for metric in passkeys]
            rows.append((f"{scaling}, untuned, {by_way[0].target:,} tokens", *cells))
    rows.append(("the best scaling, in the words of the probe", *(probed.summary for probed in by_way)))
    yield from table(("", *ways.values()), rows)
    yield ""
    yield from machines_of(record.read("chat_template/machines"))


def chat_packing() -> Lines:
    """Tuned on chats that attend to those before them, and on isolated ones."""
    yield from metrics_table(by_model(["chat_packing"]))
    _, wrapped, isolated = read_scores("chat_packing")
    yield "\nIsolated (run) vs. wrapped (base), paired, 95 %:\n"
    yield from changes_table("", list(compare(wrapped, isolated)))


def methods() -> Lines:
    """A way of tuning a row, mean and range of its seeds; then how and on what the rows were measured."""
    labels = {name: label for name, (label, _) in UNTUNED.items()}
    labels |= {f"{name}-[0-9]*": label for name, (label, _) in METHODS.items()}
    rows = []
    machines = {}
    for name, label in labels.items():
        runs = [*runs_in(f"{name}-test").values()]
        perplexities = [mean_and_range([run["perplexity"][str(window)] for run in runs], ".2f") for window in WINDOWS]
        k_max = mean_and_range([run["k_max"] for run in runs], ".0f")
        passkeys = mean_and_range([run["success_rate"] for run in runs], ".0%")
        rows.append((label, len(runs), *perplexities, k_max, passkeys))
        machines[label] = runs[-1]
    headings = [f"ppl {window}" for window in WINDOWS]
    yield from table(("method", "seeds", *headings, "k_max", "passkeys"), rows)
    yield f"\n{STEPS} steps each; {DEPTHS} distances of {TRIALS} passkeys each."
    yield from machines_of(machines)


def runs_in(pattern: str) -> dict[str, Result]:
    """The rows of compare_methods.py in files whose names match, by name."""
    files = sorted((record.RESULTS / "methods").glob(f"{pattern}.json"))
    return {file.stem: record.read(f"methods/{file.stem}") for file in files}


def rates() -> Lines:
    """Perplexity at the target, a learning rate a column."""
    tried: dict[str, dict[str, str]] = {}
    for name, (label, _) in METHODS.items():
        tried[label] = {}
        for file, run in runs_in(f"{name}-[0-9]*-validation").items():
            rate, *_ = file.removeprefix(f"{name}-").split("-")
            tried[label][rate] = f"{run['perplexity'][str(TARGET)]:.2f}"
    columns = sorted({rate for cells in tried.values() for rate in cells}, key=float)
    rows = []
    for label, cells in tried.items():
        rows.append([label, *(cells.get(rate, "") for rate in columns)])
    yield from table(("method", *columns), rows)


def lora_rates() -> Lines:
    """Rates on validation documents, named batch, rate and seed, and seeds of the best ones on test documents."""
    for names in (("untuned-validation", "validation-2", "validation-8"), ("untuned-test", "test")):
        yield from metrics_table(by_model(f"rates/{name}" for name in names))
        yield ""
    yield from machines_of(record.read("rates/machines"))


# What writes the blocks of each page.
BLOCKS: dict[str, dict[str, Callable[[], Iterable[str]]]] = {
    "README.md": {"use_context": tables_context.readme},
    "docs/results.md": {
        "smollm2": tables_smollm2.tables,
        "use_context": tables_context.smollm2,
        "chats": chats,
    },
    "docs/experiments.md": {
        "demo_seeds": demo_seeds,
        "validation": tables_smollm2.validation,
        "whole_sequences": tables_context.validation,
    },
    "docs/performance.md": {"gpu": tables_gpu.trainings, "attention": attention},
    "adapters/smollm2_135m_16k/README.md": {"control": tables_smollm2.compared},
    "benchmarks/README.md": {
        "merge": merge,
        "train_overhead": partial(speeds, "train_overhead", "median_ratio", "times as many"),
        "packing": partial(speeds, "packing", "tokens_per_second", "tokens per processor second"),
        "kernels": tables_gpu.kernels,
    },
    "benchmarks/results/methods.md": {
        "methods": methods,
        "rates": rates,
        "lora_rates": lora_rates,
        "chat_template": chat_template,
        "chat_packing": chat_packing,
    },
    "benchmarks/results/gemma3_64k.md": {"gemma3_64k": tables_context.gemma3},
    "benchmarks/results/probes.md": {
        "probe_builtin": partial(probe, "probe_builtin"),
        "probe_smollm2": partial(probe, "probe_smollm2"),
    },
    "benchmarks/results/search.md": {"search": search.tables},
    "benchmarks/results/use_context.md": {"seeds": tables_context.by_seed},
    "benchmarks/results/plan_memory.md": {"plan_memory": plan_memory},
    "docs/engines.md": {"engines": engines},
}


def write_pages() -> None:
    """Write every block, and the picture of SmolLM2."""
    for page, blocks in BLOCKS.items():
        for block, write in blocks.items():
            write_block(record.ROOT / page, block, text_of(write))
    tables_smollm2.picture(record.ROOT / "docs" / "smollm2.png")


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    write_pages()
