"""What `pi-lora plan` says of memory on a CPU, beside the peak of the process that trains: a row for each setting.

    python benchmarks/plan_memory.py [--model models/smollm2_135m_instruct] [--data builtin:stdlib] [--rows ROW ...]

Each row is a process of its own that tunes three steps; its peak is that of the whole process (resident), libraries
included, as training.jsonl has it. A row is kept in benchmarks/results/plan_memory.json
when it is measured.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from pi_lora.planning.text import planned

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "plan_memory.json"
TINY = ("model.name=builtin:tiny", "context.original=256", "context.target=4096")
ROWS: dict[str, tuple[str, ...]] = {
    "lora, 1,024 tokens": ("data.sequence_tokens=1024",),
    "lora, 2,048 tokens": ("data.sequence_tokens=2048",),
    "lora, 2,048 tokens, checkpointing": ("data.sequence_tokens=2048", "training.activation_checkpointing=true"),
    "lora, 4,096 tokens, checkpointing": ("data.sequence_tokens=4096", "training.activation_checkpointing=true"),
    "lora, 8,192 tokens, checkpointing": ("data.sequence_tokens=8192", "training.activation_checkpointing=true"),
    "lora, embeddings and norms, 2,048 tokens": ("data.sequence_tokens=2048", "tuning.also_train=embeddings_and_norms"),
    "qlora, 2,048 tokens, checkpointing": (
        "data.sequence_tokens=2048",
        "tuning.method=qlora",
        "training.activation_checkpointing=true",
    ),
    "full, 2,048 tokens, checkpointing": (
        "data.sequence_tokens=2048",
        "tuning.method=full",
        "model.dtype=float32",
        "training.activation_checkpointing=true",
    ),
    "built-in model, lora, 4,096 tokens": (*TINY, "data.positions=contiguous"),
}
RECIPE = """# A few steps on a CPU.
model: {{name: {model}, dtype: bfloat16}}
context: {{target: 16384}}
tuning: {{method: lora, rank: 16, also_train: nothing}}
data: {{source: "{data}", positions: skip}}
training: {{steps: 3, global_batch_size: 1, activation_checkpointing: false, log_every: 1}}
"""


def measured(recipe: Path, changes: tuple[str, ...], folder: Path) -> int:
    """The peak in bytes of a process that tunes three steps."""
    command = [sys.executable, "-m", "pi_lora", "train", str(recipe), *changes, "--force", "--output", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    line = (folder / "training.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return int(json.loads(line)["peak_memory"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2_135m_instruct")
    parser.add_argument("--data", default="builtin:stdlib")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "scripts"))
    from machine import machine

    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {"rows": {}}
    results |= {"machine": machine(), "model": options.model}
    with tempfile.TemporaryDirectory() as temporary:
        recipe = Path(temporary) / "one_step.yaml"
        recipe.write_text(RECIPE.format(model=options.model, data=options.data), encoding="utf-8")
        for index, row in enumerate(options.rows):
            plan = planned(recipe, ROWS[row])
            peak = measured(recipe, ROWS[row], Path(temporary) / f"run-{index}")
            results["rows"][row] = {"planned": plan.memory.peak, "measured": peak, "ratio": plan.memory.peak / peak}
            RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            print(f"{row}: planned {plan.memory.peak / 2**30:.2f} GiB, measured {peak / 2**30:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
