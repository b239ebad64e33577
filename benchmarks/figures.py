"""Every figure of the README and of docs/: the claim, the commands that measure it, its file, its data, and the hours.
benchmarks/README.md is made from the list in this file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import record  # first: it finds scripts/
from pages import made_on, table

Result = Mapping[str, Any]

HEAD = """# The figures, and how to measure them again

`make reproduce NAME=...` runs the commands of a line and writes the pages that show its figures. Results of benchmarks
are in `benchmarks/results/`; each says on what machine and day it was measured. Hours are of two CPU cores unless
another machine is named. What is finished is kept: a command that was stopped goes on when it is called again, where
its line says so. The results of an experiment land as one commit, with what they show. This page is written by
`python benchmarks/tables.py`.

"""
NOVELS = """
**The novels** are the 100 English novels of the Computational Stylistics Group, in the public domain. They are
not part of this repository:

    git clone https://github.com/computationalstylistics/100_english_novels
    git -C 100_english_novels checkout 143e601
    python benchmarks/experiment.py --split

The last line writes novels into `books_16k/train`, `validation` and `test`, by their authors. **The short benchmarks**
are BoolQ, PIQA and WinoGrande as their authors publish them, converted by
`python benchmarks/convert_tasks.py DATA short`.
"""
UNTUNED, RESULTS = "--scalings pi,yarn,theta,llama3,dynamic", "benchmarks/results"
FETCH, NOVELS_HERE = "scripts/fetch_smollm2.py", "100_english_novels/corpus"


@dataclass(frozen=True)
class Figure:
    """A line of the page. A claim is a sentence, or made from the result of the script that has the same name."""

    claim: str | Callable[[Result], str]
    commands: tuple[str, ...]
    result: str
    data: str
    hours: str


def merge(result: Result) -> str:
    seconds = {way: f"{row['seconds']:.1f} s" for way, row in result["ways"].items()}
    whole, peft = seconds["pi-lora merge"], seconds["PEFT merge_and_unload + save_pretrained"]
    return (
        f"a checked merge of 1.1 billion parameters takes {whole}, PEFT's {peft}: [merging](../docs/merging.md#memory)"
    )


def passkey(result: Result) -> str:
    grid, faster = result["grid"], result["times_faster"]
    cached, plain = faster["than_generate_with_cache"], faster["than_generate_without_cache"]
    return (
        f"{grid['depths']} x {grid['trials']} passkeys in {grid['target']:,} tokens: {cached:.1f} times as fast as "
        f"`generate` with a cache, {plain:.1f} times without; the same answers"
    )


def perplexity(result: Result) -> str:
    rows = result["models"].values()
    faster = " and ".join(f"{row['straightforward_over_sweep']:.1f}" for row in rows)
    differ = max(row["largest_relative_difference"] for row in rows)
    return (
        f"a sweep of {len(result['windows'])} windows: {faster} times as fast as one window at a time, with "
        f"vocabularies of 1,024 and 32,000; perplexities equal to {differ:.0e}"
    )


def plan_memory(result: Result) -> str:
    off = [row["ratio"] - 1 for row in result["rows"].values()]
    return (
        f"the planned memory of {len(off)} trainings on a CPU: {min(off):+.0%} to {max(off):+.0%} beside the measured"
    )


def train_overhead(result: Result) -> str:
    ratios = ", ".join(f"{run['median_ratio']:.2f} ({name.split()[0]})" for name, run in result["runs"].items())
    return f"tokens per second of `pi-lora train` beside a bare TRL script: {ratios}"


FIGURES: dict[str, Figure] = {
    "demo": Figure(
        "the README's table and picture of the built-in model, 3 seeds",
        ("scripts/demo.py --readme",),
        "`demo/scores/`",
        "builtin:stdlib",
        "0.2; continues",
    ),
    "methods": Figure(
        "[methods side by side](../docs/results.md#methods-side-by-side) on the built-in model, and their rates",
        ("scripts/compare_methods.py",),
        "`methods.json`",
        "builtin:stdlib, builtin:recall",
        "6; continues",
    ),
    "released": Figure(
        "[perplexity and passkeys](../docs/results.md#the-demo) of the released `adapters/demo`",
        ("pi-lora eval all adapters/demo --again",),
        "`adapters/demo/scores/`",
        "builtin:stdlib",
        "0.1",
    ),
    "smollm2": Figure(
        "[SmolLM2-135M from 8k to 16k](../docs/results.md#a-model-that-others-trained): the scalings, and a control",
        (FETCH, "benchmarks/experiment.py"),
        "`smollm2_16k/`",
        "the novels; the short benchmarks in `short/`",
        "16; continues",
    ),
    "chats": Figure(
        "[what chats in the mixture keep](../docs/results.md#what-chats-in-the-mixture-keep) of an instruct model",
        (
            FETCH,
            "scripts/make_chats.py models/smollm2_135m_instruct chats/train.jsonl --chats 96",
            "scripts/make_chats.py models/smollm2_135m_instruct chats/test.jsonl --chats 32 --seed 1",
            "benchmarks/chats.py",
        ),
        "`chats/`",
        "the novels",
        "1.5; continues",
    ),
    "probe_builtin": Figure(
        "[the untuned scalings](../docs/results.md#which-scaling-before-any-tuning) of the built-in model",
        (f"pi-lora probe builtin:tiny --target 1024 {UNTUNED} --dtype float32 --json {RESULTS}/probe_builtin.json",),
        "`probe_builtin.json`",
        "builtin:stdlib",
        "0.1; continues",
    ),
    "probe_smollm2": Figure(
        "[the untuned scalings](../docs/results.md#which-scaling-before-any-tuning) of SmolLM2-135M, 8k to 16k",
        (
            FETCH,
            f"pi-lora probe models/smollm2_135m_instruct --target 16384 --data {NOVELS_HERE} {UNTUNED} "
            f"--json {RESULTS}/probe_smollm2.json",
        ),
        "`probe_smollm2.json`",
        "the novels",
        "1; continues",
    ),
    "engines": Figure(
        "[what other engines compute](../docs/engines.md#measured) beyond the base's window",
        (FETCH, "benchmarks/engines.py"),
        "`engines.json`",
        "text of this repository",
        "1, and 6 GB of engines",
    ),
    "merge": Figure(merge, ("benchmarks/merge.py",), "`merge.json`", "random weights", "0.1"),
    "perplexity": Figure(perplexity, ("benchmarks/perplexity.py",), "`perplexity.json`", "builtin:stdlib", "0.1"),
    "passkey": Figure(passkey, ("benchmarks/passkey.py",), "`passkey.json`", "made by the test", "0.4"),
    "plan_memory": Figure(
        plan_memory, (FETCH, "benchmarks/plan_memory.py"), "`plan_memory.json`", "builtin:stdlib", "0.3"
    ),
    "train_overhead": Figure(
        train_overhead,
        (
            "benchmarks/train_overhead.py --steps 40",
            FETCH,
            "benchmarks/train_overhead.py --recipe smollm2_135m_16k_cpu --steps 6 --warm 2 "
            "training.global_batch_size=1",
        ),
        "`train_overhead.json`",
        "builtin:stdlib; the novels",
        "0.3",
    ),
    "theory": Figure(
        "[bounds and figures](../docs/theory.md) of the paper",
        ("pi-lora theory",),
        "`theory/`",
        "",
        "0.1",
    ),
    "gpu": Figure(
        "[speed and memory on one GPU](../docs/performance.md#measured)",
        ("benchmarks/gpu.py",),
        "`gpu.json`",
        "random weights and tokens",
        "1 of an H200; continues",
    ),
    "architectures": Figure(
        "[94 architectures](../docs/models.md) are extended, and compute what their configs say",
        ("-m pytest tests/models/test_architectures.py",),
        "the test's verdict",
        "random weights",
        "0.1",
    ),
}


def index() -> str:
    """The page: a line for each figure, with the hardware of those that are in no other page."""
    lines = []
    for name, figure in FIGURES.items():
        claim, machines = figure.claim, ""
        if callable(claim):
            result = record.read(name)
            rows = (result, *result.get("rows", result.get("runs", {})).values())
            machines = " ".join(sorted({made_on(row["machine"]) for row in rows if "machine" in row}))
            claim = claim(result)
        commands = "<br>".join(f"`{each}`" for each in figure.commands)
        lines.append((f"`{name}`", claim, commands, figure.result, machines, figure.data, figure.hours))
    head = ("NAME", "claim", "commands", "result", "measured on", "data", "hours")
    return HEAD + "\n".join(table(head, lines)) + "\n" + NOVELS
