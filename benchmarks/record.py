"""Functions that the scripts share: results in results/, with date, machine and versions a row, and clocks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from arguments import parser_of as parser_of  # noqa: E402
from machine import machine  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
Result = TypeVar("Result")
# Ctrl-C ends a script here without a traceback. A pi-lora that it runs ends by itself, and keeps what is finished.
if Path(sys.argv[0]).parent.name == "benchmarks":
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read(name: str) -> Any:
    """The results of a script, or of one of its rows; empty before they are measured."""
    file = file_of(name)
    if not file.is_file():
        return {}
    return json.loads(file.read_text(encoding="utf-8"))


def file_of(name: str) -> Path:
    """The file of the results of a script, or of one of its rows."""
    return RESULTS / f"{name}.json".replace(" ", "-")


def write(name: str, result: Mapping[str, Any]) -> None:
    """Keep the results of a script."""
    from pi_lora.storage import write_json

    write_json(file_of(name), result)


def write_row(name: str, path: tuple[str, ...], row: Mapping[str, Any]) -> None:
    """Keep one row at `path` of the results of a script; rows of other runs stay as they were."""
    result = read(name)
    inner = result
    *sections, last = path
    for key in sections:
        inner = inner.setdefault(key, {})
    inner[last] = {**row, "machine": machine()}
    write(name, result)


def training_log(*words: str) -> list[dict[str, Any]]:
    """The lines of training.jsonl, one a step, of `pi-lora train` with these words."""
    from pi_lora.run import Run

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "pi_lora", "train", *words, "--output", str(run)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return Run(run).log


def add_tokenizer(folder: Path) -> None:
    """Copy the tokenizer of the built-in model into the folder of a random model."""
    from pi_lora.models.files import BUILTIN_FOLDER

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUILTIN_FOLDER / "tiny" / name, folder / name)


def apart(work: Callable[..., Result], *arguments: object) -> Result:
    """What `work` returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def cost_of(command: list[str]) -> dict[str, float]:
    """Seconds until all that `command` wrote is on the disk, and its peak memory.

    The kernel counts the memory of a process from before it became another program: the caller has to be small.
    """
    os.sync()
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command}: exit status {process.returncode}")
    os.sync()
    return {
        "seconds": round(time.monotonic() - started, 2),
        "peak_bytes": usage.ru_maxrss * 1024,
    }
