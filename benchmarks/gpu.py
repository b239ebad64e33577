"""Speed and memory of long-context tuning on one GPU: against the card's own limits, the plan, and TRL with PEFT.

    python benchmarks/gpu.py [--minutes M] [--shape MODEL] [--tiny] [--json FILE]

A LLaMA-7B with random weights learns through pi-lora's own command. Every row is a process of its own with a time limit
and is kept in benchmarks/results/gpu.json when it is done: the same command goes on with what is missing or failed. No
job is begun that the budget of `--minutes` has no room for. `python benchmarks/tables.py` writes docs/performance.md.
`--tiny` runs every part in a small shape, on a CPU, to see that it runs.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import record  # first: it finds scripts/
from machine import machine
from on_gpu.parts import Bench, Job, Row, jobs
from on_gpu.setting import TINY, setting_of
from pi_lora.storage import write_json
from record import parser_of

# The most that a job may take.
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
            self.rows = before.pop("rows")
            if before != self.facts:
                other = f"{before['shape']} on {before['gpu']}"
                raise SystemExit(f"{file}: holds rows of {other}; write others with --json")

    def has(self, job: Job) -> bool:
        """Whether a job is done; the row of one that failed is dropped."""
        before = [row for row in self.rows if job.items() <= row.items()]
        if any("failed" not in row for row in before):
            return True
        self.rows = [row for row in self.rows if row not in before]
        return False

    def add(self, row: Row) -> None:
        """Keep a row, and print it."""
        self.rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if self.file:
            write_json(self.file, {**self.facts, "rows": self.rows})


def measure(bench: Bench, rows: Rows, minutes: float) -> None:
    """Do the jobs that are not done yet, until the budget is spent."""
    deadline = time.monotonic() + 60 * minutes
    for job in jobs(bench.setting):
        left = deadline - time.monotonic()
        if rows.has(job):
            continue
        if left < LEAST_SECONDS:
            raise SystemExit(f"--minutes {minutes:g} are over before {job}; the same command goes on with it")
        measured = bench.row(job, min(JOB_SECONDS, left))
        rows.add({**job, **measured, "machine": machine()})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="huggyllama/llama-7b", help="a model whose shape the plan knows")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin nothing that this budget has no room for")
    parser.add_argument("--tiny", action="store_true", help="every part in a tiny shape; kept only with --json")
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
        measure(Bench(setting_of(shape), Path(folder)), rows, options.minutes)
    for line in tables(rows.rows):
        print(line)
    failed = any("failed" in row for row in rows.rows)
    sys.exit(failed)


if __name__ == "__main__":
    main()
