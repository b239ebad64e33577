"""Speed and memory of long-context tuning on one GPU: against the card's own limit, the plan, and TRL with PEFT.

    python benchmarks/gpu.py [--minutes M] [--tiny]

A LLaMA-7B with random weights learns as `pi-lora train` trains. Every row is a process of its own with a time limit and
is kept in benchmarks/results/gpu/ when it is done, by card: the same command continues with what is missing or failed.
No job is begun that the budget of `--minutes` has no room for. `python benchmarks/tables.py` writes
docs/performance.md. `--tiny` runs every part in a small shape, on a CPU, to see that it runs, and keeps nothing.
"""

import json
import math
import os
import signal
import sys
import tempfile
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import record  # first: it finds scripts/
from gpu_jobs import JOBS, Row, row_of, write_recipe
from machine import machine
from record import apart, parser_of
from tables_gpu import tables

# The most that a job may take.
JOB_SECONDS = 1200
# The least for which a job is begun.
LEAST_SECONDS = 45


def measure(results: str, recipe: Path, minutes: float) -> None:
    """Do the jobs that are not done yet, until the budget is spent."""
    deadline = time.monotonic() + 60 * minutes
    for part, rows in JOBS.items():
        for name in rows:
            before = record.read(results).get(part, {}).get(name, {"failed": "not measured"})
            if "failed" not in before:
                continue
            left = deadline - time.monotonic()
            if left < LEAST_SECONDS:
                raise SystemExit(f"--minutes {minutes:g} are over before {part}, {name}; repeat the command")
            row = measured(part, name, recipe, min(JOB_SECONDS, left))
            print(part, name, json.dumps(row), file=sys.stderr, flush=True)
            record.write_row(results, (part, name), row)


def measured(part: str, name: str, recipe: Path, seconds: float) -> Row:
    """The row of a job in a process of its own, or why there is none."""
    try:
        return apart(limited, part, name, recipe, seconds)
    except BrokenProcessPool:
        return {"failed": f"no answer in {seconds:.0f} seconds"}


def limited(part: str, name: str, recipe: Path, seconds: float) -> Row:
    """Do a job in this process, which ends after so many seconds."""
    signal.alarm(math.ceil(seconds))
    try:
        return row_of(part, name, recipe)
    except Exception as error:  # of torch or CUDA, of any kind: the other rows are measured all the same
        return {"failed": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=1e6, help="begin nothing that this budget has no room for")
    parser.add_argument("--tiny", action="store_true", help="every part in a tiny shape; keeps nothing")
    options = parser.parse_args()
    card = machine()["gpu"]
    if not options.tiny and card is None:
        raise SystemExit("benchmarks/gpu.py: no CUDA device here; --tiny runs every part in a small shape on a CPU")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    results = f"gpu/{card}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.tiny:
            record.RESULTS = folder
        recipe = apart(write_recipe, folder, options.tiny)
        measure(results, recipe, options.minutes)
        parts = record.read(results)
        for line in tables(parts):
            print(line)
    sys.exit(any("failed" in row for rows in parts.values() for row in rows.values()))


if __name__ == "__main__":
    main()
