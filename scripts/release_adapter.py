"""Copy a finished run into a folder to publish, with its adapter in bfloat16, half the size, and without the place of
its base on this machine, which its recipe names and digests identify.

    python scripts/release_adapter.py RUN OUTPUT

Scores and pictures are not copied: they were measured with the float32 adapter. Measure the copy, then write its card:
`pi-lora eval ... OUTPUT --json OUTPUT/scores/...` and `pi-lora report OUTPUT`.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pi_lora.models.stored import ADAPTER_WEIGHTS_FILE
from pi_lora.run import RUN_FILE, SCORES, staged


def main(run: Path, output: Path) -> None:
    with staged(output) as folder:
        shutil.copytree(run, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SCORES, "*.png", "*.html"))
        weights = load_file(run / ADAPTER_WEIGHTS_FILE)
        half = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
        save_file(half, folder / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})
        made_with = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))
        made_with["origin"]["place"] = None
        (folder / RUN_FILE).write_text(json.dumps(made_with, indent=2) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    print(f"{output}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
