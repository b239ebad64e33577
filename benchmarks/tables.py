"""Write benchmarks/README.md and tables of docs/performance.md and docs/results.md from benchmarks/results/.

python benchmarks/tables.py
"""

import ast
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from on_gpu import page as gpu_page
from small import novels
from small import page as small_page

HERE = Path(__file__).parent
PERFORMANCE = HERE.parent / "docs" / "performance.md"
PAPER_IN_SMALL = HERE.parent / "docs" / "results.md"
ENGINES = HERE.parent / "docs" / "engines.md"
README = HERE.parent / "README.md"
NOVELS = HERE.parent / "docs" / "smollm2.png"
sys.path.append(str(HERE.parent / "scripts"))
from pages import write_block  # noqa: E402

HEAD = """# Measurements

Written by `python benchmarks/tables.py` from what the scripts here leave in `results/`. Each script runs all that it
compares in one run on one machine; run it to have the numbers of yours.
"""
MEBI, GIBI = 2**20, 2**30
GREEDY = 24  # tokens that each engine chose: see engines.py

Result = Mapping[str, Any]


def page() -> str:
    """The page: for each script what it measures, how it is called, on what it was run, and its table."""
    scripts = sorted(path for path in HERE.glob("*.py") if path != Path(__file__))
    return "".join([HEAD, *(section(path) for path in scripts)])


def section(script: Path) -> str:
    """What a script says of itself, and the table of its last result."""
    summary, command = (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n")[:2]
    lines = [f"\n## {' '.join(summary.split()).rstrip('.')}\n", f"    {command.strip()}\n"]
    file = HERE / "results" / f"{script.stem}.json"
    if not file.is_file():
        return "\n".join([*lines, "Not run yet.\n"])
    result = json.loads(file.read_text())
    # What was made at several times says for each part on what.
    made = [f"{made_on(result['machine'])}\n"] if "machine" in result else []
    return "\n".join([*lines, *made, *TABLES[script.stem](result), ""])


def made_on(machine: Result) -> str:
    """The hardware, versions and day of a result."""
    device = machine["gpu"] or f"{machine['cores']} cores of {machine['processor']}"
    return f"{device}; {machine['versions']}; {machine['date']}."


def table(*rows: tuple[object, ...]) -> Iterator[str]:
    """Rows as Markdown, the first of them the head."""
    for index, row in enumerate(rows):
        yield "| " + " | ".join(map(str, row)) + " |"
        if index == 0:
            yield "|" + "---|" * len(row)


def train_overhead(result: Result) -> Iterator[str]:
    """Tokens a second, round by round, of each recipe."""
    rows = [
        (name, each["pi_lora"], each["bare"], each["ratio"])
        for name, run in result["runs"].items()
        for each in run["rounds"]
    ]
    yield from table(("recipe", "pi-lora train, tokens/s", "bare script, tokens/s", "ratio"), *rows)
    for name, run in result["runs"].items():
        peak, plan = run["peak_memory"], run["planned_memory"]
        memory = f"peak memory {peak / GIBI:.2f} GiB, planned {plan / GIBI:.2f} ({plan / peak - 1:+.0%})"
        yield f"\n{name}: median of the ratios {run['median_ratio']:.3f}; {memory}."


def perplexity(result: Result) -> Iterator[str]:
    """A model a row: how much faster than the straightforward script, what the sweep costs, and both peaks."""
    windows = ", ".join(map(str, result["windows"]))
    yield (
        f"{result['documents']} documents of {result['tokens_each']} tokens of {result['data']}, windows {windows}, "
        f"stride {result['stride']}.\n"
    )
    rows = [
        (
            name,
            f"{row['straightforward_over_sweep']:.2f} x",
            f"{row['sweep_over_longest']:.2f} x",
            f"{row['peak_memory']['sweep'] / MEBI:.0f} MiB",
            f"{row['peak_memory']['straightforward'] / MEBI:.0f} MiB",
            f"{row['largest_relative_difference']:.0e}",
        )
        for name, row in result["models"].items()
    ]
    head = ("model", "faster", "sweep over longest alone", "peak", "straightforward's peak", "relative difference")
    yield from table(head, *rows)


def passkey(result: Result) -> Iterator[str]:
    """A way of measuring a row: seconds for the grid, and what that is beside pi-lora's."""
    grid, seconds, faster, k_max = (result[key] for key in ("grid", "seconds", "times_faster", "k_max"))
    yield (
        f"{result['model']}{'' if result['tuned'] else ', not tuned'}: {grid['depths']} distances within "
        f"{grid['target']} tokens, {grid['trials']} keys each; k_max {k_max['whole']}, "
        f"by `--k-max-only` {k_max['k_max_only']}.\n"
    )
    alone = f"{faster['k_max_only_than_whole']:.1f} x faster, by {result['trials_made']['k_max_only']} trials"
    yield from table(
        ("", "seconds", "beside pi-lora"),
        ("pi-lora", f"{seconds['pi_lora']:.1f}", ""),
        ("pi-lora, --k-max-only", f"{seconds['pi_lora_k_max_only']:.1f}", alone),
        *(
            (name.replace("_", " "), f"{seconds[name]:.1f}", f"{faster[f'than_{name}']:.1f} x slower")
            for name in ("generate_with_cache", "generate_without_cache")
        ),
    )


def lm_eval_command(result: Result) -> Iterator[str]:
    """A task a row: accuracy and standard error by both, in full."""
    yield f"Inputs of at most {result['window']} tokens, {result['batch_size']} a forward pass.\n"
    rows = [
        (name, row["examples"], *(f"{accuracy} ± {error}" for accuracy, error in (row["pi_lora"], row["lm_eval"])))
        for name, row in result["tasks"].items()
    ]
    yield from table(("task", "examples", "pi-lora eval benchmarks", "lm-eval run"), *rows)
    seconds = result["seconds"]
    yield f"\n{seconds['pi_lora']:.0f} s and {seconds['lm_eval']:.0f} s, start and loading in both."


def ruler(result: Result) -> Iterator[str]:
    """A task a row: its score by both, and the median seconds of both, of a processor and by the clock."""
    rounds = f"in turns, {result['rounds']} each"
    yield f"Windows of {result['window']:,} tokens, {result['samples']} samples; {rounds}.\n"
    rows = []
    for name, row in result["tasks"].items():
        ways = (row["pi_lora"], row["lm_eval"])
        equal = f"{ways[0]['score']}, equal" if ways[0]["score"] == ways[1]["score"] else "**different**"
        seconds = [[median(each[key] for each in way["seconds"]) for way in ways] for key in ("processor", "clock")]
        rows.append((name, equal, *(f"{each:.0f}" for pair in seconds for each in pair)))
    of_each = ("processor seconds, pi-lora", "lm-eval", "by the clock, pi-lora", "lm-eval")
    yield from table(("task", "score", *of_each), *rows)
    yield "\nOther work ran on the machine: its processor seconds compare, the clock's hardly."


def merge(result: Result) -> Iterator[str]:
    """For each size a table, a way of merging a row: seconds until all is on the disk, and the peak."""
    for size, ways in result.items():
        rows = [
            (way, f"{row['seconds']:.1f}", f"{row['processor_seconds']:.1f}", f"{row['peak_bytes'] / 1e9:.2f} GB")
            for way, row in ways.items()
            if way != "machine"
        ]
        yield f"{size.upper()} parameters; {made_on(ways['machine'])}\n"
        yield from table(("", "seconds", "of a processor", "peak memory"), *rows)
        yield ""


def loading(result: Result) -> Iterator[str]:
    """A model a row: seconds to load a run of it with its checks and without, and by the time in the checks."""
    ways = {"clock": "clock", "processor": "processor", "inside": "processor, less the time in the checks"}
    rows = [
        (name, measured, *(row[key][way] for way in ("checked", "unchecked")), f"{row[key]['ratio']:.3f}")
        for name, row in result["models"].items()
        for key, measured in ways.items()
    ]
    yield from table(("model", "seconds of", "checked", "unchecked", "ratio"), *rows)
    yield f"\nThe least of {result['rounds']} rounds, on {result['threads']} thread(s)."


def length_groups(result: Result) -> Iterator[str]:
    """A distribution of lengths a row: tokens a second of each way, and how much faster grouping is."""
    rows = []
    for name, row in result["lengths"].items():
        speeds = [
            f"{row['tokens_per_second'][how]:,.0f} ({row['no_padding'][how]:.0%})"
            for how in ("padded", "shuffled", "grouped")
        ]
        spread = f"{row['shortest']:,} / {row['mean']:,} / {row['longest']:,}"
        rows.append((name, row["examples"], spread, *speeds, f"{row['grouped_over_padded']:.2f} x"))
    yield f"{result['at_once']} examples a batch; in brackets the share of what is computed that is no padding.\n"
    head = (
        "lengths",
        "examples",
        "shortest / mean / longest",
        "padded to the longest, tokens/s",
        "shuffled",
        "grouped",
    )
    yield from table((*head, "grouped over padded"), *rows)


def gpu(result: Result) -> Iterator[str]:
    """They have a page of their own."""
    yield "The tables: [docs/performance.md](../docs/performance.md#measured)."


def paper_in_small(result: Result) -> Iterator[str]:
    """They stand among the results."""
    yield "The tables: [docs/results.md](../docs/results.md#the-papers-tables-in-small)."


def plan_memory(result: Result) -> Iterator[str]:
    """A setting a row: what the plan says, the peak that was measured, and how far the plan is from it."""
    rows = [
        (
            name,
            row["layers"],
            f"{row['vocabulary']:,}",
            f"{row['tokens']:,}",
            *(f"{row[key] / 2**30:.2f} GiB" for key in ("planned", "measured")),
            f"{row['ratio'] - 1:+.0%}",
        )
        for name, row in result["rows"].items()
    ]
    base = "bfloat16" if result["bfloat16"] else "float32"
    yield f"`training.precision: auto` is {base} here; models that are not named are random, with SmolLM2's widths.\n"
    yield from table(("setting", "layers", "vocabulary", "tokens", "planned", "measured", "difference"), *rows)


def smollm2(result: Result) -> Iterator[str]:
    """They stand among the results."""
    yield "The tables: [docs/results.md](../docs/results.md#a-model-that-others-trained)."


def engines(result: Result) -> Iterator[str]:
    """They stand on the page about engines."""
    yield "The tables: [docs/engines.md](../docs/engines.md#measured)."


def engine_tables(result: Result) -> Iterator[str]:
    """For each model a table, an engine a row: what it made of the merged weights, beside transformers 5."""
    head = ("engine", "window read", "largest difference", "perplexity", "greedy tokens", "day")
    for name, model in result["models"].items():
        yield (
            f"`{name}`, {model['original']:,} to {model['target']:,} tokens: {model['tokens']:,} tokens of "
            f"{model['text']}, then {GREEDY} chosen greedily; perplexity is of those beyond {model['original']:,}.\n"
        )
        yield from table(head, *(_engine_row(engine, row) for engine, row in model["rows"].items()))
        yield ""


def _engine_row(engine: str, row: Result) -> tuple[object, ...]:
    name = engine.replace("_adapter", ", adapter on its base").replace("_", " ")
    if "failed" in row:
        return (name, f"**failed**: {row['failed'].replace('|', ' ')}", "", "", "", row["date"])
    package, version = next(iter(row["versions"].items()))
    greedy = f"{row['greedy']} of {GREEDY}"
    if row["as_unscaled"]:
        greedy = f"**{greedy}: those of the unscaled model**"
    elif row["greedy"] < GREEDY:
        behind = "no likely one" if row["behind"] is None else f"{row['behind']:.2g} nats less likely"
        greedy += f"; the next is {behind}"
    window = f"{row['window']:,}" if row["window"] else "none"
    if "largest" not in row:
        return (f"{name} ({package} {version})", window, "not given", "not given", greedy, row["date"])
    both = f"{row['perplexity']:.3f}, here {row['expected']:.3f}"
    return (f"{name} ({package} {version})", window, f"{row['largest']:.1e} nats", both, greedy, row["date"])


def block_of(script: str, write: Callable[[Result], Iterator[str]], nothing: str) -> str:
    """What a page of docs says of the last result of a script, or that there is none."""
    file = HERE / "results" / f"{script}.json"
    if not file.is_file():
        return nothing
    result = json.loads(file.read_text())
    return "\n".join([f"{made_on(result['machine'])}\n", *write(result), ""])


def blocks() -> Iterator[tuple[Path, str, str]]:
    """Pages of docs, the blocks in them that are written here, and their texts."""
    yield PERFORMANCE, "gpu", block_of("gpu", gpu_page.tables, gpu_page.NOTHING)
    yield PAPER_IN_SMALL, "paper in small", block_of("paper_in_small", small_page.tables, small_page.NOTHING)
    yield PAPER_IN_SMALL, "smollm2", block_of("smollm2", novels.tables, novels.NOTHING)
    yield ENGINES, "engines", block_of("engines", engine_tables, "Not run yet.\n")
    yield README, "smollm2", block_of("smollm2", novels.short_table, novels.NOTHING)


TABLES: dict[str, Callable[[Result], Iterator[str]]] = {
    "engines": engines,
    "gpu": gpu,
    "length_groups": length_groups,
    "lm_eval_command": lm_eval_command,
    "loading": loading,
    "merge": merge,
    "paper_in_small": paper_in_small,
    "passkey": passkey,
    "perplexity": perplexity,
    "plan_memory": plan_memory,
    "ruler": ruler,
    "smollm2": smollm2,
    "train_overhead": train_overhead,
}


if __name__ == "__main__":
    (HERE / "README.md").write_text(page(), encoding="utf-8")
    for place, name, text in blocks():
        write_block(place, name, text)
    novel_scores = HERE / "results" / "smollm2.json"
    if novel_scores.is_file():
        novels.picture(json.loads(novel_scores.read_text()), NOVELS)
