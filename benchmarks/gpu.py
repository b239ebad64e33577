"""Speed and memory of long-context tuning on one GPU: against the card's own limits, the plan, and the neighbours.

    python benchmarks/gpu.py [--tiny] [--shape MODEL] [--parts PART ...] [--caps GB ...]

A LLaMA-7B with random weights, made where it computes, learns random tokens through pi-lora's own trainer. Every
contender has a process of its own. Results go to benchmarks/results/gpu.json, part by part, so that one part may be run
again; `python benchmarks/tables.py` writes docs/performance.md from them. `longest` is asked for by
name: `--parts longest --caps 24 48 80` finds the longest sequence that each memory holds. `--tiny` runs every part in
a small shape, on a CPU, to see that it runs, and writes nothing unless told where.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from on_gpu.parts import PARTS, TINY, Job, Row, jobs, run

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
BY_DEFAULT = [part for part in PARTS if part != "longest"]


def in_a_process(job: Job, shape: str) -> list[Row]:
    """The rows of a job; one that fails is a row that says how, and costs no other."""
    # Long sequences of different lengths fragment the allocator's usual blocks; the neighbours get the same.
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    command = [sys.executable, __file__, "--shape", shape, "--job", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    # Trainers print as well, dictionaries among it.
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        rows.append({"failed": (done.stderr.strip().splitlines() or ["no word"])[-1][:300]})
    return [{**{key: value for key, value in job.items() if key != "part"}, **row} for row in rows]


def measure(options: argparse.Namespace) -> dict[str, list[Row]]:
    """The rows of every part, with a progress bar."""
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    found: dict[str, list[Row]] = {part: [] for part in options.parts}
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as bar:
        work = list(jobs(options))
        task = bar.add_task("", total=len(work))
        for job in work:
            bar.update(task, description=" ".join(map(str, job.values())))
            found[job["part"]] += in_a_process(job, options.shape)
            bar.advance(task)
    return found


def kept(before: dict[str, Any], options: argparse.Namespace, found: dict[str, list[Row]], minutes: float) -> Row:
    """What the file is to hold: the parts measured now, and those measured before of this shape on such a card."""
    sys.path.append(str(ROOT / "scripts"))
    from machine import machine

    here = machine()
    then = before.get("machine", {})
    same = before.get("shape") == options.shape and all(then.get(key) == here[key] for key in ("gpu", "versions"))
    earlier = before if same else {}
    took = {**earlier.get("minutes", {}), " ".join(options.parts): minutes}
    return {**earlier, "machine": here, "shape": options.shape, **found, "minutes": took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="huggyllama/llama-7b", help="a model whose shape the plan knows")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="all but `longest` unless given")
    parser.add_argument("--caps", nargs="+", type=float, default=[None], help="GB of memory for `longest`")
    parser.add_argument("--tries", type=int, default=4, help="lengths that `longest` tries under each cap")
    parser.add_argument("--tiny", action="store_true", help="every part in a tiny shape")
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
    started = time.perf_counter()
    found = measure(options)
    file = options.json or (None if options.tiny else RESULTS)
    before = json.loads(file.read_text()) if file and file.exists() else {}
    result = kept(before, options, found, (time.perf_counter() - started) / 60)
    if file:
        file.write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(tables(result)))
    sys.exit(any("failed" in row for rows in found.values() for row in rows))


if __name__ == "__main__":
    main()
