"""Whether `pi-lora eval benchmarks` gives what lm-eval's own command gives, to the last digit, and how long each takes.

    python benchmarks/lm_eval_command.py DATA [--limit N] [--batch-size 8] [--window 512]

DATA is a folder that `convert_tasks.py` wrote. Both commands measure the built-in model on the same examples, each in
a process of its own; lm-eval reads them through task files that include its own tasks and say where the examples are.
Inputs are cut to more tokens than the model's own 256, which do not hold every answer of PIQA. JSON goes to
benchmarks/results/.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import seconds_of, write_run

BASES = {"boolq": "super_glue/boolq/default.yaml", "piqa": "piqa/piqa.yaml", "winogrande": "winogrande/default.yaml"}
NAMES = tuple(BASES)
PREFIX = "own_"


def write_task(folder: Path, name: str, base: str, file: Path, split: str = "validation", **changes: Any) -> None:
    """A task file of lm-eval that is its own task `base` on the examples in `file`."""
    import lm_eval.tasks
    import yaml

    definition = {
        "include": str(Path(lm_eval.tasks.__file__).parent / base),
        "task": PREFIX + name,
        "dataset_path": "json",
        "dataset_name": None,
        "training_split": None,
        "dataset_kwargs": {"data_files": {split: str(file)}, "cache_dir": str(folder / "cache")},
        **changes,
    }
    (folder / f"{PREFIX}{name}.yaml").write_text(yaml.safe_dump(definition))


def write_tasks(folder: Path, data: Path) -> None:
    """Task files for the three, without a line of pi-lora's."""
    folder.mkdir()
    for name, base in BASES.items():
        write_task(folder, name, base, (data / f"{name}.jsonl").resolve())


def theirs(tasks: Path, limit: int | None, batch_size: int, window: int) -> dict[str, Any]:
    """What lm-eval's own command writes of the built-in model, by task."""
    from pi_lora.models.location import BUILTIN_FOLDER

    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained={BUILTIN_FOLDER / 'tiny'},dtype=float32,max_length={window}"]
    command += ["--tasks", ",".join(PREFIX + name for name in NAMES), "--include_path", str(tasks)]
    command += ["--batch_size", str(batch_size), "--output_path", str(tasks / "theirs.json")]
    command += ["--limit", str(limit)] if limit else []
    subprocess.run(command, check=True, capture_output=True)
    (written,) = tasks.glob("theirs*.json")
    results = json.loads(written.read_text())["results"]
    return {name: results[PREFIX + name] for name in NAMES}


def ours(data: Path, folder: Path, limit: int | None, batch_size: int, window: int) -> dict[str, Any]:
    """What `pi-lora eval benchmarks` writes of it, by task."""
    file = folder / "ours.json"
    command = [sys.executable, "-m", "pi_lora", "eval", "benchmarks", "builtin:tiny", "--tasks", ",".join(NAMES)]
    command += [f"--data={name}={data / name}.jsonl" for name in NAMES]
    command += ["--dtype", "float32", "--batch-size", str(batch_size)]
    command += ["--window", str(window), "--json", str(file)]
    command += ["--limit", str(limit)] if limit else []
    subprocess.run(command, check=True, capture_output=True)
    return dict(json.loads(file.read_text())["tasks"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--limit", type=int, help="only the first N examples of each")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--window", type=int, default=512)
    options = parser.parse_args()
    asked = {"limit": options.limit, "batch_size": options.batch_size, "window": options.window}
    with tempfile.TemporaryDirectory() as temporary:
        tasks = Path(temporary) / "tasks"
        write_tasks(tasks, options.data)
        mine: dict[str, Any] = {}
        own: dict[str, Any] = {}
        seconds = {
            "pi_lora": seconds_of(lambda: mine.update(ours(options.data, Path(temporary), **asked))),
            "lm_eval": seconds_of(lambda: own.update(theirs(tasks, **asked))),
        }
    rows = {
        name: {
            "examples": mine[name]["examples"],
            "pi_lora": [mine[name]["acc"], mine[name]["stderr"]],
            "lm_eval": [own[name]["acc,none"], own[name]["acc_stderr,none"]],
        }
        for name in NAMES
    }
    write_run("lm_eval_command", {**asked, "seconds": seconds, "tasks": rows})
    for name, row in rows.items():
        print(f"{name}: {'equal' if row['pi_lora'] == row['lm_eval'] else 'DIFFERENT'}: {row}")
    print(seconds)


if __name__ == "__main__":
    main()
