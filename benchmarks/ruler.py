"""Whether `pi-lora eval ruler` gives what `lm_eval run` gives on the same samples, to the last digit, and how long each
takes.

    python benchmarks/ruler.py [--tasks niah_single_1 ruler_vt ruler_fwe] [--window 1280] [--samples 20] [--rounds 2]

Both commands measure the built-in model, a task and a process at a time, in turns; lm-eval takes one length a command
without skipping samples. Times are those of whole processes, start and loading included. JSON goes to
benchmarks/results/.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "ruler.json"
SEED = 0
Json = dict[str, Any]


def timed(command: list[str]) -> dict[str, float]:
    """The seconds that a command takes, by the clock and of processors."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"clock": seconds, "processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def ours(folder: Path, task: str, options: argparse.Namespace) -> tuple[Json, dict[str, float]]:
    """What `pi-lora eval ruler` writes of a task, and how long it takes."""
    file = folder / "ours.json"
    command = [sys.executable, "-m", "pi_lora", "eval", "ruler", "builtin:tiny", "--tasks", task, "--json", str(file)]
    command += ["--windows", str(options.window), "--samples", str(options.samples), "--seed", str(SEED)]
    seconds = timed([*command, "--dtype", "float32", "--batch-size", str(options.batch_size)])
    return json.loads(file.read_text(encoding="utf-8"))["lengths"][0]["tasks"][task], seconds


def theirs(folder: Path, task: str, length: int, options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """The score that lm-eval's own command gives for a task whose prompts are made for `length` tokens."""
    from pi_lora.models.location import BUILTIN_FOLDER

    model = f"pretrained={BUILTIN_FOLDER / 'tiny'},dtype=float32,max_length={options.window}"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--model_args", model]
    command += [
        "--tasks",
        task,
        "--limit",
        str(options.samples),
        "--metadata",
        json.dumps({"max_seq_lengths": [length]}),
    ]
    command += ["--seed", f"{SEED},{SEED + 1234},{SEED}", "--batch_size", str(options.batch_size)]
    seconds = timed([*command, "--output_path", str(folder / "theirs.json")])
    (written,) = folder.glob("theirs*.json")
    scores = json.loads(written.read_text(encoding="utf-8"))["results"][task]
    written.unlink()
    return scores[f"{length},none"], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["niah_single_1", "ruler_vt", "ruler_fwe"])
    parser.add_argument("--window", type=int, default=1280)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "scripts"))
    from machine import machine

    tasks: dict[str, Json] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for _ in range(options.rounds):
            for task in options.tasks:
                row = tasks.setdefault(task, {"pi_lora": {"seconds": []}, "lm_eval": {"seconds": []}})
                found, seconds = ours(Path(temporary), task, options)
                score, their_seconds = theirs(Path(temporary), task, found["length"], options)
                row |= {"length": found["length"]}
                row["pi_lora"] = {"score": found["score"], "seconds": [*row["pi_lora"]["seconds"], seconds]}
                row["lm_eval"] = {"score": score, "seconds": [*row["lm_eval"]["seconds"], their_seconds]}
                print(task, "equal" if score == found["score"] else "DIFFERENT", seconds, their_seconds, flush=True)
    asked = {key: getattr(options, key) for key in ("window", "samples", "batch_size", "rounds")}
    RESULTS.write_text(json.dumps({"machine": machine(), **asked, "tasks": tasks}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
