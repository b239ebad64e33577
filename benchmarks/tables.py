"""Write benchmarks/README.md, and tables of docs/ and of the README, from benchmarks/results/.

python benchmarks/tables.py
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import record  # first: it finds scripts/
import tables_gpu
import tables_smollm2
from pages import machines_of, made_on, mean_and_range, table, write_block
from tables_smollm2 import table_of_perplexity

HERE = Path(__file__).parent
DOCS = record.ROOT / "docs"
HEAD = """# Measurements

Written by `python benchmarks/tables.py` from what the scripts here leave in `results/`. Each script runs all that it
compares in one run on one machine; run it to have the numbers of yours.
"""
NOT_RUN = "Not run yet.\n"
MEBI, GIBI = 2**20, 2**30
GREEDY = 24  # tokens that each engine chose: see engines.py

Result = Mapping[str, Any]
Lines = Iterator[str]


def page() -> str:
    """The page: for each script what it measures, how it is called, on what it was run, and its table."""
    return "".join([HEAD, *(section(HERE / f"{name}.py") for name in sorted(TABLES))])


def section(script: Path) -> str:
    """The summary of a script, and the table of its last result."""
    summary, command = (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n")[:2]
    lines = [f"\n## {' '.join(summary.split()).rstrip('.')}\n", f"    {command.strip()}\n"]
    return "\n".join([*lines, text_of(script.stem, TABLES[script.stem])])


def text_of(name: str, write: Callable[[Result], Iterable[str]]) -> str:
    """The tables of a result, after the machine that all of it was measured on; or that there is none."""
    if not (result := record.read(name)):
        return NOT_RUN
    machine = [f"{made_on(result['machine'])}\n"] if "machine" in result else []
    return "\n".join([*machine, *write(result), ""])


def train_overhead(result: Result) -> Lines:
    """Tokens a second, round by round, of each recipe."""
    rounds = [
        (name, each["pi_lora"], each["bare"], each["ratio"])
        for name, run in result["runs"].items()
        for each in run["rounds"]
    ]
    yield from table(("recipe", "pi-lora train, tokens/s", "bare script, tokens/s", "ratio"), rounds)
    for name, run in result["runs"].items():
        peak, plan = run["peak_memory"], run["planned_memory"]
        memory = f"peak memory {peak / GIBI:.2f} GiB, planned {plan / GIBI:.2f} ({plan / peak - 1:+.0%})"
        yield f"\n{name}: median of the ratios {run['median_ratio']:.3f}; {memory}. {made_on(run['machine'])}"


def perplexity(result: Result) -> Lines:
    """A model a row: how much faster than the straightforward script, what the sweep costs, and both peaks."""
    yield (
        f"{result['documents']} documents of {result['tokens_each']} tokens of {result['data']}, windows "
        f"{', '.join(map(str, result['windows']))}, stride {result['stride']}.\n"
    )
    head = ("model", "faster", "sweep over longest alone", "peak", "straightforward's peak", "relative difference")
    rows = [
        (
            name,
            f"{row['straightforward_over_sweep']:.2f} x",
            f"{row['sweep_over_longest']:.2f} x",
            *(f"{row['peak_memory'][way] / MEBI:.0f} MiB" for way in ("sweep", "straightforward")),
            f"{row['largest_relative_difference']:.0e}",
        )
        for name, row in result["models"].items()
    ]
    yield from table(head, rows)


def passkey(result: Result) -> Lines:
    """A way of measuring a row: seconds for the grid, and what that is beside pi-lora's."""
    grid, seconds, faster, k_max = (result[key] for key in ("grid", "seconds", "times_faster", "k_max"))
    yield (
        f"{result['model']}{'' if result['tuned'] else ', not tuned'}: {grid['depths']} distances within "
        f"{grid['target']} tokens, {grid['trials']} keys each; k_max {k_max['whole']}, "
        f"by `--k-max-only` {k_max['k_max_only']}.\n"
    )
    only = f"{faster['k_max_only_than_whole']:.1f} x faster, by {result['trials_made']['k_max_only']} trials"
    rows = [
        ("pi-lora", f"{seconds['pi_lora']:.1f}", ""),
        ("pi-lora, --k-max-only", seconds["pi_lora_k_max_only"], only),
    ]
    for name in ("generate_with_cache", "generate_without_cache"):
        rows.append((name.replace("_", " "), f"{seconds[name]:.1f}", f"{faster[f'than_{name}']:.1f} x slower"))
    yield from table(("", "seconds", "beside pi-lora"), rows)


def merge(result: Result) -> Lines:
    """A way of merging a row: seconds until all is on the disk, and the peak."""
    rows = [
        (way, f"{row['seconds']:.1f}", f"{row['processor_seconds']:.1f}", f"{row['peak_bytes'] / 1e9:.2f} GB")
        for way, row in result["ways"].items()
    ]
    yield from table(("", "seconds", "of a processor", "peak memory"), rows)


def plan_memory(result: Result) -> Lines:
    """A setting a row: what the plan says, the peak that was measured, and how far the plan is from it."""
    yield from machines_of(result["rows"])
    yield "Models that are not named are random, with SmolLM2's widths.\n"
    rows = [
        (
            name,
            row["layers"],
            f"{row['vocabulary']:,}",
            f"{row['tokens']:,}",
            *(f"{row[key] / GIBI:.2f} GiB" for key in ("planned", "measured")),
            f"{row['ratio'] - 1:+.0%}",
        )
        for name, row in result["rows"].items()
    ]
    yield from table(("setting", "layers", "vocabulary", "tokens", "planned", "measured", "difference"), rows)


def engines(result: Result) -> Lines:
    """For each model a table, an engine a row: its answers about the merged weights, beside transformers 5."""
    head = ("engine", "window read", "largest difference", "perplexity", "greedy tokens", "day")
    for name, model in result["models"].items():
        yield (
            f"`{name}`, {model['original']:,} to {model['target']:,} tokens: {model['tokens']:,} tokens of "
            f"{model['text']}, then {GREEDY} chosen greedily; perplexity is of those beyond {model['original']:,}.\n"
        )
        yield from table(head, [engine_row(engine, row) for engine, row in model["rows"].items()])
        yield ""
        yield from machines_of(model["rows"])
        yield ""


def engine_row(engine: str, row: Result) -> tuple[object, ...]:
    """The cells of one engine."""
    name, day = engine.replace("_adapter", ", adapter on its base").replace("_", " "), row["machine"]["date"]
    if "failed" in row:
        return (name, f"**failed**: {row['failed'].replace('|', ' ')}", "", "", "", day)
    greedy = f"{row['greedy']} of {GREEDY}"
    if row["as_unscaled"]:
        greedy = f"**{greedy}: those of the unscaled model**"
    window = f"{row['window']:,}" if row["window"] else "none"
    both = ("not given", "not given")
    if "largest" in row:
        both = (f"{row['largest']:.1e} nats", f"{row['perplexity']:.3f}, here {row['expected']:.3f}")
    package, version = next(iter(row["versions"].items()))
    return (f"{name} ({package} {version})", window, *both, greedy, day)


def methods(result: Result) -> Lines:
    """A way of tuning a row, mean and range of its seeds; then on what the rows were measured."""
    windows = list(next(iter(result["rows"].values()))[0]["perplexity"])
    rows = []
    for name, runs in result["rows"].items():
        perplexities = (mean_and_range([run["perplexity"][window] for run in runs], ".2f") for window in windows)
        reached = mean_and_range([run["k_max"] for run in runs], ".0f")
        retrieved = mean_and_range([run["success_rate"] for run in runs], ".0%")
        rows.append([result["labels"][name], len(runs), *perplexities, reached, retrieved, *("", "", "")])
        if "seconds" in runs[0]:
            rows[-1][-3:] = [
                f"{runs[0]['trainable_parameters'] / 1e6:.2f} M",
                f"{fmean(run['seconds'] for run in runs):.0f}",
                f"{max(run['peak_memory'] for run in runs) / GIBI:.2f} GiB",
            ]
    head = ["method", "seeds", *(f"ppl {window}" for window in windows), "k_max", "passkeys", "trainable", "seconds"]
    yield from table([*head, "peak memory"], rows)
    yield f"\n{result['steps']} steps each."
    yield from machines_of({result["labels"][name]: runs[-1] for name, runs in result["rows"].items()})


def rates(result: Result) -> Lines:
    """Perplexity at the target and passkeys by learning rate."""
    rows = []
    for name, runs in result["rates"].items():
        for rate, run in runs.items():
            window, perplexity = list(run["perplexity"].items())[-1]
            found = (f"{perplexity:.2f}", run["k_max"], f"{run['success_rate']:.0%}")
            rows.append((result["labels"][name], rate, *found))
    yield from table(("method", "rate", f"ppl {window}", "k_max", "passkeys"), rows)


def elsewhere(page: str, heading: str) -> Callable[[Result], Lines]:
    """The tables stand on another page."""
    return lambda result: iter([f"The tables: [docs/{page}](../docs/{page}#{heading})."])


TABLES: dict[str, Callable[[Result], Lines]] = {
    "engines": elsewhere("engines.md", "measured"),
    "gpu": elsewhere("performance.md", "measured"),
    "merge": merge,
    "passkey": passkey,
    "perplexity": perplexity,
    "plan_memory": plan_memory,
    "smollm2": elsewhere("results.md", "a-model-that-others-trained"),
    "train_overhead": train_overhead,
}
# Page, name of the block in it, name of the result, and what writes its tables.
BLOCKS: list[tuple[Path, str, str, Callable[[Result], Iterable[str]]]] = [
    (DOCS / "performance.md", "gpu", "gpu", tables_gpu.tables),
    (DOCS / "results.md", "smollm2", "smollm2", tables_smollm2.tables),
    (DOCS / "results.md", "methods", "methods", methods),
    (DOCS / "results.md", "rates", "methods", rates),
    (DOCS / "engines.md", "engines", "engines", engines),
    (record.ROOT / "README.md", "smollm2", "smollm2", table_of_perplexity),
]


def write_pages() -> None:
    """Write every page and block, and the picture of SmolLM2."""
    (HERE / "README.md").write_text(page(), encoding="utf-8")
    for place, name, script, write in BLOCKS:
        write_block(place, name, text_of(script, write))
    tables_smollm2.picture(record.read("smollm2"), DOCS / "smollm2.png")


if __name__ == "__main__":
    write_pages()
