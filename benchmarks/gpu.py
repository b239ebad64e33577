"""Speed and memory of long-context tuning on one GPU: against the card's own limits, the plan, and the neighbours.

    python benchmarks/gpu.py [--tiny] [--shape MODEL] [--parts PART ...] [--caps GB ...] [--resume]

A LLaMA-7B with random weights, made where it computes, learns random tokens through pi-lora's own trainer. Every
contender has a process of its own. Results go to benchmarks/results/gpu.json, row by row as they are measured:
`--resume` goes on with what was interrupted or failed, and one part may be run again. `python benchmarks/tables.py`
writes docs/performance.md from them. `longest` is asked for by name: `--parts longest --caps 24 48 80` finds the
longest sequence that each memory holds. `--tiny` runs every part in a small shape, on a CPU, to see that it runs, and
writes nothing unless told where.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from on_gpu.parts import PARTS, TINY, Job, Row, jobs, run

from pi_lora.writing import write_json

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
BY_DEFAULT = [part for part in PARTS if part != "longest"]


def in_a_process(job: Job, shape: str) -> Iterator[Row]:
    """The rows of a job as they come; one that fails is a row that says how, and costs no other."""
    # Long sequences of different lengths fragment the allocator's usual blocks; the neighbours get the same.
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    command = [sys.executable, __file__, "--shape", shape, "--job", json.dumps(job)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
    ):
        assert process.stdout
        for line in process.stdout:
            # Trainers print as well, dictionaries among it.
            if line.startswith('{"'):
                yield {**of_rows(job), **json.loads(line)}
        if process.wait():
            errors.seek(0)
            said = errors.read()
            print(said, file=sys.stderr)
            yield {**of_rows(job), "failed": (said.strip().splitlines() or ["no word"])[-1][:300]}


def of_rows(job: Job) -> Row:
    """What all rows of a job say of it."""
    return {key: value for key, value in job.items() if key != "part"}


def measure(options: argparse.Namespace, result: Row, keep: Callable[[Row], None]) -> None:
    """Add the rows of every part to `result` and keep it after each, with a progress bar; skip `finished` jobs."""
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as bar:
        work = list(jobs(options))
        task = bar.add_task("", total=len(work))
        for job in work:
            bar.update(task, description=" ".join(map(str, job.values())))
            if job not in result["finished"]:
                rows = result[job["part"]]
                # Of a job that was interrupted.
                rows[:] = [row for row in rows if not of_rows(job).items() <= row.items()]
                started, before = time.perf_counter(), result["minutes"].get(job["part"], 0.0)
                for row in in_a_process(job, options.shape):
                    rows.append(row)
                    result["minutes"][job["part"]] = before + (time.perf_counter() - started) / 60
                    keep(result)
                if not any("failed" in row for row in rows if of_rows(job).items() <= row.items()):
                    result["finished"].append(job)
                    keep(result)
            bar.advance(task)


def begun(before: dict[str, Any], options: argparse.Namespace) -> Row:
    """What the file is to hold: the parts measured now, and those measured before of this shape on such a card."""
    sys.path.append(str(ROOT / "scripts"))
    from machine import machine

    here = machine()
    then = before.get("machine", {})
    same = before.get("shape") == options.shape and all(then.get(key) == here[key] for key in ("gpu", "versions"))
    earlier = before if same else {}
    again = [] if options.resume else options.parts
    return {
        **{part: [] for part in options.parts},
        **{key: value for key, value in earlier.items() if key not in again},
        "machine": here,
        "shape": options.shape,
        "minutes": {key: value for key, value in earlier.get("minutes", {}).items() if key not in again},
        "finished": [job for job in earlier.get("finished", []) if job["part"] not in again],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="huggyllama/llama-7b", help="a model whose shape the plan knows")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="all but `longest` unless given")
    parser.add_argument("--caps", nargs="+", type=float, default=[None], help="GB of memory for `longest`")
    parser.add_argument("--tries", type=int, default=4, help="lengths that `longest` tries under each cap")
    parser.add_argument("--tiny", action="store_true", help="every part in a tiny shape")
    parser.add_argument("--resume", action="store_true", help="skip what is measured already")
    parser.add_argument("--json", type=Path, help="where to, instead of benchmarks/results/gpu.json")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        run(json.loads(options.job), options.shape, lambda row: print(json.dumps(row), flush=True))
        return
    options.shape = TINY if options.tiny else options.shape
    options.parts = options.parts or (list(PARTS) if options.tiny else BY_DEFAULT)
    import torch
    from on_gpu.page import tables

    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py: no CUDA device here; --tiny runs every part in a small shape on a CPU")
    file = options.json or (None if options.tiny else RESULTS)
    before = json.loads(file.read_text()) if file and file.exists() else {}
    result = begun(before, options)
    measure(options, result, lambda found: write_json(file, found) if file else None)
    print("\n".join(tables(result)))
    sys.exit(any("failed" in row for part in options.parts for row in result[part]))


if __name__ == "__main__":
    main()
