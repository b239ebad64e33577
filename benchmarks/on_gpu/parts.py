"""The parts of benchmarks/gpu.py: the jobs of each, and how one job becomes one row, in a process of its own."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pi_lora
from on_gpu.attention import SHAPES
from on_gpu.contender import PI_LORA, PLAIN
from on_gpu.setting import TINY, Changes, Setting, write_model
from pi_lora.recipe.files import dump_recipe

HERE = Path(__file__).parent
PARTS = ("ceilings", "attention", "training", "neighbours", "levers")
METHODS = ("lora", "qlora", "full")
# What the trainers of other tools train.
ADAPTER_ALONE: Changes = {"tuning": {"modules_to_save": "nothing"}}
# Steps of a contender, of which the first warms up.
STEPS = 3
ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt)\b", re.MULTILINE)

Job = Mapping[str, Any]
Row = dict[str, Any]


def jobs(setting: Setting, part: str) -> Iterator[Job]:
    """The jobs of a part."""
    job = {"part": part, "tokens": setting.tokens}
    if part == "ceilings":
        yield {"part": part}
    elif part == "attention":
        for model in SHAPES:
            yield {**job, "model": model}
    elif part == "training":
        for method in METHODS:
            yield {**job, "method": method}
    elif part == "neighbours":
        for method in ("lora", "qlora"):
            for contender in (PI_LORA, PLAIN):
                yield {**job, "method": method, "contender": contender}
    else:
        for changes in levers(setting.name == TINY):
            yield {**job, "method": "lora", "changes": changes}


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
    """A shape, and a folder for a model of it and its recipes."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self.setting = setting
        self.folder = folder

    def row(self, job: Job, seconds: float) -> Row:
        """Do a job, in at most so many seconds."""
        setting = self.setting
        if job["part"] == "ceilings":
            heads = setting.config["num_attention_heads"]
            head_dim = setting.config["hidden_size"] // heads
            return answer([HERE / "ceilings.py", heads, head_dim, setting.tokens], seconds)
        if job["part"] == "attention":
            return answer([HERE / "attention.py", job["model"], job["tokens"]], seconds)
        return self.train(job, seconds)

    def train(self, job: Job, seconds: float) -> Row:
        """Some steps of one contender, beside the plan."""
        base = self.folder / "base"
        if not base.exists():
            write_model(self.setting, base)
        changes = ADAPTER_ALONE if job["part"] == "neighbours" else job.get("changes", {})
        recipe = self.setting.recipe(base, job["method"], changes)
        file = self.folder / "recipe.yaml"
        file.write_text(f"# Random weights.\n{dump_recipe(recipe)}", encoding="utf-8")
        plan = pi_lora.plan(file)
        contender = job.get("contender", PI_LORA)
        row: Row = {
            "contender": contender,
            "layers": self.setting.config["num_hidden_layers"],
            "sequences": 1,
            "flops": {name: operations / recipe.training.steps for name, operations in plan.flops._asdict().items()},
        }
        if contender == PI_LORA:  # the plan is of its trainer
            row["planned_bytes"] = plan.memory.highest
        return row | answer([HERE / "contender.py", STEPS, contender, file], seconds)


def answer(arguments: Sequence[object], seconds: float) -> Row:
    """The row that Python with `arguments` prints as its last line within so many seconds, or why it failed."""
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdout=printed,
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
        if status:
            return failure_of(errors.read())
        printed.seek(0)
        *_, last = printed.read().splitlines()
        return dict(json.loads(last))


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
