"""The parts of benchmarks/gpu.py: the jobs of each, and how one job becomes one row, in a process of its own."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from on_gpu.attention import SHAPES
from on_gpu.contender import COMPILED, PI_LORA, PLAIN, UNSLOTH
from on_gpu.setting import TINY, Changes, Setting, add_weights, config_folder, plan_of, write_recipe

HERE = Path(__file__).parent
PARTS = ("ceilings", "attention", "training", "neighbours", "levers", "demo", "longest")
METHODS = ("lora", "qlora", "full")
ADAPTER_ALONE = {"tuning": {"modules_to_save": "nothing"}}
LONG = 32768
# GB of memory, and a length in tokens beyond the one that Unsloth publishes for it: Llama-3.1-8B, QLoRA, batch 1, with
# an adapter alone of rank 32.
BEYOND_UNSLOTH = {24: 78_848, 48: 192_512, 80: 343_040}
RANK_32 = {"rank": 32, "modules_to_save": "nothing"}
# The levers that cost little time.
LONGEST: Changes = {
    "tuning": RANK_32,
    "training": {"mlp_chunk_tokens": 4096, "optimizer": "paged_adamw_8bit"},
    "hardware": {"offload_activations": True},
}
# A paged optimizer and offloading need a GPU.
LONGEST_ON_CPU: Changes = {"tuning": RANK_32, "training": {"mlp_chunk_tokens": 16}}
ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt)\b", re.MULTILINE)

Job = Mapping[str, Any]
Row = dict[str, Any]


def jobs(setting: Setting, part: str) -> Iterator[Job]:
    """The jobs of a part."""
    compared = {"part": part, "tokens": setting.compared}
    if part == "training":
        for method in METHODS:
            for tokens in setting.lengths:
                yield {"part": part, "method": method, "tokens": tokens}
    elif part == "neighbours":
        yield from neighbours(compared, setting.name == TINY)
    elif part == "levers":
        for changes in levers(setting.name == TINY):
            yield {**compared, "method": "lora", "changes": changes}
    elif part == "attention":
        for shape in SHAPES:
            yield {**compared, "model": shape}
    elif part == "longest":
        yield from longest(setting)
    else:
        yield {"part": part}


def longest(setting: Setting) -> Iterator[Job]:
    """The jobs of `longest`: whether a step runs in so much memory."""
    job = {"part": "longest", "method": "qlora"}
    if setting.name == TINY:
        yield {**job, "cap": None, "tokens": setting.compared, "changes": LONGEST_ON_CPU}
        return
    for cap, tokens in BEYOND_UNSLOTH.items():
        yield {**job, "cap": cap, "tokens": tokens, "changes": LONGEST}


def neighbours(compared: Job, tiny: bool) -> Iterator[Job]:
    """The jobs of all contenders."""
    contenders = [PI_LORA, PLAIN]
    if not tiny:
        contenders.append(COMPILED)
    if importlib.util.find_spec("unsloth"):
        contenders.append(UNSLOTH)
    for method in ("lora", "qlora"):
        for contender in contenders:
            yield {**compared, "method": method, "contender": contender}


def levers(tiny: bool) -> list[Changes]:
    """Changes of the recipe, each measured beside the first, which changes nothing; a CPU has not all of them."""
    chunks = {"training": {"mlp_chunk_tokens": 32 if tiny else 4096}}
    checkpointing = [{"training": {"activation_checkpointing": value}} for value in (False, "selective", 2)]
    everywhere: list[Changes] = [{}, chunks, *checkpointing, ADAPTER_ALONE]
    if tiny:
        return everywhere
    offload = {"hardware": {"offload_activations": True}}
    kernels: list[Changes] = [{"model": {"kernels": "liger"}}]
    if importlib.util.find_spec("flash_attn"):
        kernels.append({"model": {"attention": "flash_attention_2"}})
    paged = {"training": {"optimizer": "paged_adamw_8bit"}}  # last: managed memory can upset the card
    return [*everywhere, *kernels, offload, {**chunks, **offload}, paged]


class Bench:
    """A shape, the card, and a folder with its base models and recipes."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        import torch

        self.setting = setting
        self.folder = folder
        self.on_gpu = torch.cuda.is_available()
        self.memory = torch.cuda.get_device_properties(0).total_memory if self.on_gpu else 0

    def base(self, setting: Setting) -> Path:
        """The folder of a base model without weights."""
        return config_folder(setting.name, setting.layers, self.folder)

    def row(self, job: Job, seconds: float) -> Row:
        """Do a job, in at most so many seconds."""
        if job["part"] == "ceilings":
            return self.ceilings(seconds)
        if job["part"] == "attention":
            words = [HERE / "attention.py", job["model"], job["tokens"]]
            return answer([str(word) for word in words], seconds)
        if job["part"] == "demo":
            return self.demo(seconds)
        return self.train(job, seconds)

    def ceilings(self, seconds: float) -> Row:
        """The speeds of products, copies and attention in this shape."""
        heads = self.setting.config["num_attention_heads"]
        head_dim = self.setting.config["hidden_size"] // heads
        words = [HERE / "ceilings.py", heads, head_dim, self.setting.compared]
        return answer([str(word) for word in words], seconds)

    def demo(self, seconds: float) -> Row:
        """Seconds of `pi-lora train demo`, start to finish, as a user runs it."""
        steps = 2 if self.setting.name == TINY else 760
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            words = ["train", "demo", f"training.steps={steps}", "--output", f"{folder}/demo"]
            failure = run(["-m", "pi_lora", *words], seconds, os.devnull)
            return failure or {"steps": steps, "seconds": time.perf_counter() - started}

    def train(self, job: Job, seconds: float) -> Row:
        """Some steps of one contender, beside the plan; fewer layers where all weights train."""
        setting = self.setting
        if job["method"] == "full" and self.on_gpu:
            setting = self.layers_that_fit()
        default: Changes = ADAPTER_ALONE if job["part"] == "neighbours" else {}
        changes = job.get("changes", default)
        contender = job.get("contender", PI_LORA)
        base = self.base(setting)
        recipe = setting.recipe(base, job["method"], job["tokens"], changes)
        file = write_recipe(recipe, self.folder)
        plan = plan_of(file, self.card(job))
        row: Row = {
            "contender": contender,
            "layers": setting.layers,
            "sequences": recipe.training.global_batch_size,
            "flops": {name: operations / plan["steps"] for name, operations in plan["flops"].items()},
        }
        if contender == PI_LORA:  # the plan is of its trainer, as it comes
            row["planned_bytes"] = plan["allocated"]
        add_weights(base)
        steps = steps_of(job)
        memory_share = self.memory_share(job)
        answered = self.folder / "row.json"
        answered.unlink(missing_ok=True)
        words = [HERE / "contender.py", answered, steps, memory_share, contender, file]
        failure = run([str(word) for word in words], seconds)
        if answered.is_file():
            measured: Row = json.loads(answered.read_text())
            return row | measured
        return row | (failure or {"failed": "no answer"})

    def memory_share(self, job: Job) -> float:
        """The share of the card's memory that a job may use, by its cap in GB."""
        cap = job.get("cap")
        if not cap or not self.on_gpu:
            return 1.0
        return float(min(1.0, cap * 1e9 / self.memory))

    def layers_that_fit(self) -> Setting:
        """As many layers of the shape as train in full at the compared length, by the plan."""

        def fits(layers: int) -> bool:
            setting = self.setting.with_layers(layers)
            recipe = setting.recipe(self.base(setting), "full", setting.compared)
            plan = plan_of(write_recipe(recipe, self.folder), self.card({}))
            return bool(plan["fits"])

        layers = self.setting.layers
        while layers > 4 and not fits(layers):
            layers -= 4
        return self.setting.with_layers(layers)

    def card(self, job: Job) -> str:
        """The memory that a plan is for, as `--gpu` takes it."""
        gigabytes = job.get("cap") or self.memory / 1e9
        return f"{max(1, int(gigabytes))}GB" if gigabytes else "cpu"


def steps_of(job: Job) -> int:
    """The steps of a contender: fewer of long sequences."""
    if job["part"] == "longest":
        return 1
    return 2 if job["tokens"] >= LONG else 3


def run(arguments: Sequence[str], seconds: float, output: str | None = None) -> Row | None:
    """Run Python with `arguments` for at most so many seconds; return the row that says why it failed, if it did."""
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    with tempfile.TemporaryFile("w+") as errors, open(output or os.devnull, "w") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=out,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer in {seconds:.0f} seconds"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        errors.seek(0)
        return failure_of(errors.read()) if status else None


def answer(arguments: Sequence[str], seconds: float) -> Row:
    """The row that a Python process prints as its last line."""
    with tempfile.NamedTemporaryFile("r") as printed:
        failure = run(arguments, seconds, printed.name)
        if failure:
            return failure
        lines = printed.read().splitlines()
        return dict(json.loads(lines[-1]))


def failure_of(errors: str) -> Row:
    """The reason why a process failed: that memory ran out, or its exception from its first line on."""
    if re.search(r"OutOfMemoryError|out of memory", errors):
        return {"out_of_memory": True}
    exceptions = list(ERROR.finditer(errors))
    if exceptions:
        text = errors[exceptions[-1].start() :]
    else:
        _, _, text = errors.strip().rpartition("\n")
    message = " ".join(text.split())
    return {"failed": message[:300] or "no message"}
