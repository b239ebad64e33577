"""What a run's checks add to loading it, in turns, in one process.

    python benchmarks/loading.py [--rounds 9]

Checked are the digest of its base, that weights are complete and finite, those of the adapter too, and the tokenizer's
files. A run of SmolLM2-135M (`python scripts/smollm2.py` makes its base) and one on a random LLaMA of 1.1 billion
parameters in bfloat16, which is made in a temporary folder; both become float32. Files are read from the page cache, so
that the checks show as much as they can. Processor time in the checks themselves is told apart as well, since it does
not depend on what else ran in another round. JSON goes to benchmarks/results/.
"""

import argparse
import contextlib
import gc
import importlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from merge import make

from pi_lora.models.model import find, load
from pi_lora.run import RUN_FILE

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "loading.json"
SMOLLM2 = ROOT / "adapters" / "smollm2_135m_16k"
CHECKS = (
    "model.Model.check_origin",
    "weights._check_complete",
    "finite.finite",
    "tokenizer_files.check_files",
    "tokenizer_files.try_out",
)


@contextlib.contextmanager
def replaced(by: Callable[[Any], Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for check in CHECKS:
            module, _, name = f"pi_lora.models.{check}".rpartition(".")
            stack.enter_context(patch(f"{module}.{name}", by(getattr(importlib.import_module(module), name))))
        yield


def loaded(run: Path, checked: bool) -> dict[str, float]:
    """Seconds of the clock and of the processor for loading a run, and of the latter those in its checks."""
    inside: list[float] = []

    def timed(check: Any) -> Any:
        def run_timed(*arguments: Any) -> Any:
            begin = time.thread_time()
            try:
                return check(*arguments)
            finally:
                inside.append(time.thread_time() - begin)

        return run_timed

    gc.collect()
    with replaced(timed if checked else lambda _: lambda *_: True):
        begin, worked = time.monotonic(), time.process_time()
        load(str(run))
        return {"clock": time.monotonic() - begin, "processor": time.process_time() - worked, "checks": sum(inside)}


def known_by_content(run: Path, folder: Path) -> Path:
    """A copy of a run that says what its base holds, as every run does that is trained now."""
    shutil.copytree(run, folder)
    file = folder / RUN_FILE
    said = json.loads(file.read_text()) if file.is_file() else {}
    origin = find(str(folder)).origin("", "").model_dump()
    file.write_text(json.dumps({**said, "origin": origin}))
    return folder


def compared(run: Path, rounds: int) -> dict[str, dict[str, float]]:
    """The fewest seconds with the checks and without, alternating which comes first: other work only adds to them."""
    load(str(run))
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for number in range(rounds):
        for checked in sorted(found, reverse=bool(number % 2)):
            found[checked].append(loaded(run, checked))
    lowest = {way: {name: min(each[name] for each in times) for name in times[0]} for way, times in found.items()}
    inside = min(found[True], key=lambda each: each["processor"])
    return {
        "clock": of_both(lowest[True]["clock"], lowest[False]["clock"]),
        "processor": of_both(lowest[True]["processor"], lowest[False]["processor"]),
        "inside": of_both(inside["processor"], inside["processor"] - inside["checks"]),
    }


def of_both(checked: float, unchecked: float) -> dict[str, float]:
    return {"checked": round(checked, 3), "unchecked": round(unchecked, 3), "ratio": round(checked / unchecked, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name, contextlib.chdir(ROOT):
        folder = Path(name)
        make("1.1b", folder)
        for title, run in (("SmolLM2-135M", SMOLLM2), ("random LLaMA, 1.1B", folder / "run")):
            result[title] = compared(known_by_content(run, folder / run.name.replace("run", "known")), options.rounds)
            print(title, result[title], flush=True)
    sys.path.insert(0, str(ROOT / "scripts"))
    from machine import machine

    RESULTS.write_text(
        json.dumps(
            {"machine": machine(), "threads": torch.get_num_threads(), "rounds": options.rounds, "models": result},
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
