"""The parts of benchmarks/gpu.py: the jobs of each, and how one job becomes one row, in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from on_gpu.attention import SHAPES
from on_gpu.contender import PI_LORA, PLAIN
from on_gpu.setting import Changes, Setting, base_of, plan_of, write_recipe

HERE = Path(__file__).parent
METHODS = ("lora", "qlora", "full")
# The first step warms up.
STEPS = 3
ADAPTER_ALONE = {"tuning": {"modules_to_save": "nothing"}}
# Changes of the recipe, each measured beside the first, which changes nothing.
LEVERS: tuple[Changes, ...] = (
    {},
    {"training": {"mlp_chunk_tokens": 4096}},
    {"training": {"activation_checkpointing": False}},
    {"training": {"activation_checkpointing": "selective"}},
)
ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt)\b", re.MULTILINE)

Job = Mapping[str, Any]
Row = dict[str, Any]


def jobs(setting: Setting) -> Iterator[Job]:
    """The jobs of all parts."""
    tokens = setting.tokens
    yield {"part": "ceilings"}
    for shape in SHAPES:
        yield {"part": "attention", "tokens": tokens, "model": shape}
    for method in METHODS:
        yield {"part": "training", "tokens": tokens, "method": method}
    for contender in (PI_LORA, PLAIN):
        yield {"part": "neighbours", "tokens": tokens, "method": "lora", "contender": contender}
    for changes in LEVERS:
        yield {"part": "levers", "tokens": tokens, "method": "lora", "changes": changes}


class Bench:
    """A shape, the card, and a folder with its base model and recipes."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        import torch

        self.setting = setting
        self.folder = folder
        self.card = "cpu"
        if torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory
            self.card = f"{int(memory / 1e9)}GB"

    def row(self, job: Job, seconds: float) -> Row:
        """Do a job, in at most so many seconds."""
        if job["part"] == "ceilings":
            return self.ceilings(seconds)
        if job["part"] == "attention":
            return answer(["attention.py", job["model"], str(job["tokens"])], seconds)
        return self.train(job, seconds)

    def ceilings(self, seconds: float) -> Row:
        """The speeds of products, copies and attention in this shape."""
        heads = self.setting.config["num_attention_heads"]
        head_dim = self.setting.config["hidden_size"] // heads
        sizes = (heads, head_dim, self.setting.tokens)
        return answer(["ceilings.py", *map(str, sizes)], seconds)

    def train(self, job: Job, seconds: float) -> Row:
        """Some steps of one contender, beside the plan."""
        default: Changes = ADAPTER_ALONE if job["part"] == "neighbours" else {}
        contender = job.get("contender", PI_LORA)
        base = base_of(self.setting, self.folder)
        recipe = self.setting.recipe(base, job["method"], job.get("changes", default))
        file = write_recipe(recipe, self.folder)
        plan = plan_of(file, self.card)
        row: Row = {
            "contender": contender,
            "flops": {name: operations / plan["steps"] for name, operations in plan["flops"].items()},
        }
        if contender == PI_LORA:  # the plan is of its trainer, as it comes
            row["planned_bytes"] = plan["allocated"]
        measured = answer(["contender.py", str(STEPS), contender, str(file)], seconds)
        return row | measured


def answer(words: Sequence[str], seconds: float) -> Row:
    """The row that a script of this folder prints as its last line, in at most so many seconds; or why it has none."""
    script, *arguments = words
    with subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ},
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer in {seconds:.0f} seconds"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        return failure_of(errors)
    lines = output.splitlines()
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
