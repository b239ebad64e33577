"""What a run's checks add to loading it, in turns, in one process.

    python benchmarks/loading.py [--rounds 9]

Checked are the digest of its base, that weights are complete and finite, those of the adapter too, and the tokenizer's
files. A run of SmolLM2-135M (`python scripts/smollm2.py` makes its base) and one on a random LLaMA of 1.1 billion
parameters in bfloat16, which is made in a temporary folder; both become float32. Files are read from the page cache, so
that the checks show as much as they can. JSON goes to benchmarks/results/.
"""

import argparse
import contextlib
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from merge import make

from pi_lora.models.load import adapter_base, load
from pi_lora.models.origin import RUN_FILE, origin_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "loading.json"
SMOLLM2 = ROOT / "adapters" / "smollm2_135m_16k"
CHECKS = (
    "load.check_origin",
    "base._check_complete",
    "finite.finite",
    "base.check_file",
    "base.try_out",
)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for check in CHECKS:
            stack.enter_context(patch(f"pi_lora.models.{check}", lambda *_: True))
        yield


def seconds(run: Path) -> tuple[float, float]:
    """Of the clock and of the processor, for loading a run."""
    gc.collect()
    begin, worked = time.monotonic(), time.process_time()
    load(str(run))
    return time.monotonic() - begin, time.process_time() - worked


def known_by_content(run: Path, folder: Path) -> Path:
    """A copy of a run that says what its base holds, as every run does that is trained now."""
    shutil.copytree(run, folder)
    file = folder / RUN_FILE
    said = json.loads(file.read_text()) if file.is_file() else {}
    origin = origin_of(adapter_base(folder)[0], "", "").model_dump()
    file.write_text(json.dumps({**said, "origin": origin}))
    return folder


def compared(run: Path, rounds: int) -> dict[str, object]:
    """Seconds with the checks and without, alternating which comes first, and the medians of their ratios."""
    load(str(run))
    found: dict[str, list[tuple[float, float]]] = {"checked": [], "unchecked": []}
    for number in range(rounds):
        for way in sorted(found, reverse=bool(number % 2)):
            with unchecked() if way == "unchecked" else contextlib.nullcontext():
                found[way].append(seconds(run))
    pairs = list(zip(found["checked"], found["unchecked"], strict=True))
    return {
        "rounds": rounds,
        **{
            name: {
                **{way: round(statistics.median(each[index] for each in found[way]), 3) for way in found},
                "ratio": round(statistics.median(ours[index] / bare[index] for ours, bare in pairs), 4),
            }
            for index, name in enumerate(("clock", "processor"))
        },
    }


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

    RESULTS.write_text(json.dumps({"machine": machine(), "models": result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
