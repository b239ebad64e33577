"""Speed and memory of long-context tuning on one GPU: against the card's own limits, the plan, and the neighbours.

    python benchmarks/gpu.py [--minutes M] [--parts PART ...] [--lengths TOKENS ...] [--methods METHOD ...]
                            [--shape MODEL] [--again] [--tiny]

A LLaMA-7B with random weights learns through pi-lora's own command. Every row is a process of its own with a time limit
and is kept in benchmarks/results/gpu.json when it is done: the same command goes on with what is missing or failed, and
`--again` measures anew. No job is begun that the budget of `--minutes` has no room for. `python benchmarks/tables.py`
writes docs/performance.md. `--tiny` runs every part in a small shape, on a CPU, to see that it runs.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import record  # first: it finds scripts/
from machine import machine
from on_gpu.contender import PI_LORA
from on_gpu.parts import METHODS, PARTS, Bench, Job, Row, jobs
from on_gpu.setting import TINY, setting_of
from pi_lora.storage import write_json
from record import parser_of

# The most that a job may take: a step of the longest sequence.
JOB_SECONDS = 1200
# The least for which a job is begun.
LEAST_SECONDS = 45


class Rows:
    """The rows of a file, kept as they come; those of another shape or card are not mixed with them."""

    def __init__(self, file: Path | None, shape: str, gpu: str | None) -> None:
        self.file = file
        self.facts = {"shape": shape, "gpu": gpu}
        self.rows: list[Row] = []
        if file and file.is_file():
            before = json.loads(file.read_text())
            if (before["shape"], before["gpu"]) != (shape, gpu):
                other = f"{before['shape']} on {before['gpu']}"
                raise SystemExit(f"{file}: holds rows of {other}; write others with --json")
            self.rows = before["rows"]

    def of(self, job: Job) -> list[Row]:
        """The rows of a job, which hold what it asks for."""
        # As a row has it that was read from a file: with lists in place of tuples.
        keys = json.loads(json.dumps({"contender": PI_LORA, **job}))
        return [row for row in self.rows if keys.items() <= {"contender": PI_LORA, **row}.items()]

    def add(self, row: Row) -> None:
        """Keep a row in place of one of the same job that failed, and say what it holds."""
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if self.file:
            write_json(self.file, {**self.facts, "rows": self.rows})


def measure(bench: Bench, rows: Rows, options: argparse.Namespace) -> None:
    """Do the jobs that are not done yet, until the budget is spent."""
    deadline = time.monotonic() + 60 * (options.minutes or 10**6)

    def do(job: Job) -> None:
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            raise SystemExit(f"--minutes {options.minutes:g} are over before {job}; the same command goes on with it")
        before = rows.of(job)
        rows.rows[:] = [row for row in rows.rows if row not in before]
        measured = bench.row(job, min(JOB_SECONDS, left))
        rows.add({**job, **measured, "machine": machine()})

    for part in options.parts:
        if options.again:
            rows.rows[:] = [row for row in rows.rows if row["part"] != part]
        for job in jobs(bench.setting, part):
            done = any("failed" not in row for row in rows.of(job))
            if is_asked_for(job, options) and not done:
                do(job)


def is_asked_for(job: Job, options: argparse.Namespace) -> bool:
    """Whether `--lengths` and `--methods` have the length and the method of a job, if it has any."""
    is_that_long = not options.lengths or job.get("tokens") in {None, *options.lengths}
    trains_so = not options.methods or job.get("method") in {None, *options.methods}
    return is_that_long and trains_so


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="huggyllama/llama-7b", help="a model whose shape the plan knows")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--lengths", nargs="+", type=int, help="only the jobs of these lengths in tokens")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="only the jobs of these methods")
    parser.add_argument("--minutes", type=float, help="begin nothing that this budget has no room for")
    parser.add_argument("--tiny", action="store_true", help="every part in a tiny shape; kept only with --json")
    parser.add_argument("--again", action="store_true", help="measure the parts anew")
    parser.add_argument("--json", type=Path, help="where to, instead of benchmarks/results/gpu.json")
    options = parser.parse_args()
    from tables_gpu import tables

    gpu = machine()["gpu"]
    if not options.tiny and gpu is None:
        raise SystemExit("benchmarks/gpu.py: no CUDA device here; --tiny runs every part in a small shape on a CPU")
    shape: str = options.shape
    file: Path | None = record.RESULTS / "gpu.json"
    if options.tiny:
        shape = TINY
        file = None
    rows = Rows(options.json or file, shape, gpu)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(setting_of(shape), Path(folder))
        measure(bench, rows, options)
    for line in tables({**rows.facts, "rows": rows.rows}):
        print(line)
    failed = any("failed" in row for row in rows.rows)
    sys.exit(failed)


if __name__ == "__main__":
    main()
