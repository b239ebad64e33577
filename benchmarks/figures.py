"""Every figure of the README and of docs/: the claim, the commands that measure it, its file, its data, and the hours.
benchmarks/README.md is made from the list in this file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record  # first: it finds scripts/
from pages import made_on, table

Result = Mapping[str, Any]

HEAD = """# The figures, and how to measure them again

`make reproduce NAME=...` runs the commands of a row and writes the pages that show its figures. Results are in
`benchmarks/results/`, each with machine and day. Hours are for two CPU cores unless another machine is named. If the
row says "continues", a command that was stopped keeps finished work and continues when it is called again. The scripts
write files and commit nothing; commit all results of an experiment together, with the pages that show them.
`python benchmarks/tables.py` writes this page.

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
UNTUNED = "--scalings pi,yarn,theta,llama3,dynamic"
RESULTS = "benchmarks/results"
FETCH = "scripts/fetch_model.py smollm2_135m_instruct"
FETCH_GEMMA = "scripts/fetch_model.py gemma3_270m"
NOVELS_HERE = "100_english_novels/corpus"


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
    whole = seconds["pi-lora merge"]
    peft = seconds["PEFT merge_and_unload + save_pretrained"]
    return (
        f"a checked merge of 1.1 billion parameters takes {whole}, PEFT's {peft}: [merging](../docs/merging.md#memory)"
    )


def plan_memory(result: Result) -> str:
    off = [row["ratio"] - 1 for row in result["rows"].values()]
    return (
        f"the planned memory of {len(off)} trainings on a CPU: {min(off):+.0%} to {max(off):+.0%} beside the measured"
    )


def train_overhead(result: Result) -> str:
    ratios = []
    for name, run in result["runs"].items():
        label, *changes = name.split()
        for change in changes:
            if change.startswith("model.name="):
                label = Path(change).name
        ratios.append(f"{run['median_ratio']:.2f} ({label})")
    return f"tokens per second of `pi-lora train` beside a bare TRL script: {', '.join(ratios)}"


FIGURES: dict[str, Figure] = {
    "demo": Figure(
        claim="the README's table and picture of the built-in model, 3 seeds",
        commands=("scripts/demo.py --readme",),
        result="`demo/scores/`",
        data="builtin:stdlib",
        hours="0.2; continues",
    ),
    "methods": Figure(
        claim="[methods side by side](../docs/results.md#methods-side-by-side) on the built-in model, and their rates",
        commands=("scripts/compare_methods.py",),
        result="`methods.json`",
        data="builtin:stdlib, builtin:recall",
        hours="6; continues",
    ),
    "released": Figure(
        claim="[perplexity and passkeys](../docs/results.md#the-demo) of the released `adapters/demo`",
        commands=("pi-lora eval all adapters/demo --again",),
        result="`adapters/demo/scores/`",
        data="builtin:stdlib",
        hours="0.1",
    ),
    "smollm2": Figure(
        claim="[SmolLM2-135M from 8k to 16k](../docs/results.md#a-model-that-others-trained): "
        "the scalings, and a control",
        commands=(FETCH, "benchmarks/experiment.py"),
        result="`smollm2_16k/`",
        data="the novels; the short benchmarks in `short/`",
        hours="16; continues",
    ),
    "use_context": Figure(
        claim="[the use of 16k tokens](../docs/results.md#does-it-use-the-context) after tuning on whole sequences",
        commands=(FETCH, FETCH_GEMMA, "benchmarks/use_context.py smollm2"),
        result="`use_context/`",
        data="the novels; ten long LaTeX files in `math/`",
        hours="0.2 of an H200; continues",
    ),
    "gemma3_64k": Figure(
        claim="[Gemma 3 270M from 32k to 64k](../docs/results.md#gemma-3-270m-from-32k-to-64k), probe to merge",
        commands=(FETCH_GEMMA, "benchmarks/use_context.py gemma3"),
        result="`gemma3_64k/`",
        data="the novels",
        hours="0.2 of an H200; continues",
    ),
    "chats": Figure(
        claim="[what chats in the mixture keep](../docs/results.md#what-chats-in-the-mixture-keep) "
        "of an instruct model",
        commands=(
            FETCH,
            "scripts/make_chats.py models/smollm2_135m_instruct chats/train.jsonl --chats 96",
            "scripts/make_chats.py models/smollm2_135m_instruct chats/test.jsonl --chats 32 --seed 1",
            "benchmarks/chats.py",
        ),
        result="`chats/`",
        data="the novels",
        hours="1.5; continues",
    ),
    "probe_builtin": Figure(
        claim="[the untuned scalings](../docs/results.md#which-scaling-before-any-tuning) of the built-in model",
        commands=(
            f"pi-lora probe builtin:tiny --target 1024 {UNTUNED} --dtype float32 --json {RESULTS}/probe_builtin.json",
        ),
        result="`probe_builtin.json`",
        data="builtin:stdlib",
        hours="0.1; continues",
    ),
    "probe_smollm2": Figure(
        claim="[the untuned scalings](../docs/results.md#which-scaling-before-any-tuning) of SmolLM2-135M, 8k to 16k",
        commands=(
            FETCH,
            f"pi-lora probe models/smollm2_135m_instruct --target 16384 --data {NOVELS_HERE} {UNTUNED} "
            f"--json {RESULTS}/probe_smollm2.json",
        ),
        result="`probe_smollm2.json`",
        data="the novels",
        hours="1; continues",
    ),
    "search": Figure(
        claim="[divisors of the frequencies that a search finds](../docs/results.md#factors-by-measuring)",
        commands=("benchmarks/search.py builtin", FETCH, "benchmarks/search.py smollm2"),
        result="`search/`",
        data="builtin:stdlib; the novels",
        hours="3; continues",
    ),
    "engines": Figure(
        claim="[what other engines compute](../docs/engines.md#measured) beyond the base's window",
        commands=(FETCH, "benchmarks/engines.py"),
        result="`engines.json`",
        data="text of this repository",
        hours="1, and 6 GB of engines",
    ),
    "merge": Figure(
        claim=merge,
        commands=("benchmarks/merge.py",),
        result="`merge.json`",
        data="random weights",
        hours="0.1",
    ),
    "plan_memory": Figure(
        claim=plan_memory,
        commands=(FETCH, "benchmarks/plan_memory.py"),
        result="`plan_memory.json`",
        data="builtin:stdlib",
        hours="0.3",
    ),
    "train_overhead": Figure(
        claim=train_overhead,
        commands=(
            "benchmarks/train_overhead.py --steps 40",
            FETCH,
            "benchmarks/train_overhead.py --recipe smollm2_135m_16k_cpu --steps 6 --warm 2 "
            "training.global_batch_size=1",
            FETCH_GEMMA,
            "benchmarks/train_overhead.py --recipe smollm2_135m_16k_cpu --steps 3 --warm 1 "
            "data.source=builtin:stdlib training.global_batch_size=1 training.warmup_steps=1 "
            "model.name=models/gemma3_270m context.original=32768 context.target=65536 data.sequence_tokens=8192 "
            "training.activation_checkpointing=true",
            "benchmarks/train_overhead.py --recipe smollm2_135m_16k_cpu --steps 4 --warm 1 "
            "data.source=builtin:stdlib training.global_batch_size=1 training.warmup_steps=1 "
            "model.name=models/gpt_oss_random context.target=16384 data.sequence_tokens=4096",
        ),
        result="`train_overhead.json`",
        data="builtin:stdlib; the novels",
        hours="0.3",
    ),
    "attention": Figure(
        claim="[what attention in blocks saves](../docs/performance.md#attention-in-blocks) on a CPU",
        commands=(FETCH, FETCH_GEMMA, "benchmarks/attention.py"),
        result="`attention.json`",
        data="the novels; random tokens",
        hours="0.7",
    ),
    "theory": Figure(
        claim="[bounds and figures](../docs/theory.md) of the paper",
        commands=("pi-lora theory",),
        result="`theory/`",
        data="",
        hours="0.1",
    ),
    "gpu": Figure(
        claim="[speed and memory on one GPU](../docs/performance.md#measured)",
        commands=("benchmarks/gpu.py",),
        result="`gpu.json`",
        data="random weights and tokens",
        hours="1 of an H200; continues",
    ),
    "architectures": Figure(
        claim="[95 architectures](../docs/models.md) are extended, and compute what their configs say",
        commands=("-m pytest tests/models/test_architectures.py",),
        result="the test's verdict",
        data="random weights",
        hours="0.1",
    ),
}


def index() -> str:
    """The page: a line for each figure, with the hardware of those that are in no other page."""
    lines = []
    for name, figure in FIGURES.items():
        claim = figure.claim
        machines = ""
        if callable(claim):
            result = record.read(name)
            rows = (result, *result.get("rows", result.get("runs", {})).values())
            machines = " ".join(sorted({made_on(row["machine"]) for row in rows if "machine" in row}))
            claim = claim(result)
        commands = "<br>".join(f"`{command}`" for command in figure.commands)
        lines.append((f"`{name}`", claim, commands, figure.result, machines, figure.data, figure.hours))
    head = ("NAME", "claim", "commands", "result", "measured on", "data", "hours")
    return HEAD + "\n".join(table(head, lines)) + "\n" + NOVELS
