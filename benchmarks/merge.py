"""`pi-lora merge` against PEFT's `merge_and_unload` + `save_pretrained`, and against `cp`: time and memory.

    python benchmarks/merge.py             # a random LLaMA of 1.1 billion parameters, bfloat16, 500 MB shards: minutes
    python benchmarks/merge.py --size 13b  # 26 GB twice: made, merged by pi-lora alone, deleted

Every way is a process of its own, timed with its imports and until all is on the disk (`sync`); peak memory is what the
kernel counted for that process. The adapter has rank 16 on all linear layers. The result goes to benchmarks/results/.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "merge.json"
SHARD = 500_000_000
RANK = 16
SIZES = {
    "1.1b": {
        "num_hidden_layers": 22,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "13b": {
        "num_hidden_layers": 40,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
}
PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
PeftModel.from_pretrained(model, sys.argv[2]).merge_and_unload().save_pretrained(sys.argv[3], max_shard_size="500MB")
"""
# What `pi-lora merge --no-verify` imports before it reads anything.
IMPORTS = "import pi_lora.merging.merging, transformers.models.llama.modeling_llama"


def make(size: str, folder: Path) -> None:
    """A base of random weights and a run on it, written as they are drawn."""
    import torch
    from peft import LoraConfig
    from transformers import LlamaConfig

    from pi_lora.merging.shards import Planned, filled_shards, write_shards
    from pi_lora.models.location import BUILTIN_FOLDER
    from pi_lora.models.model import Extension, find
    from pi_lora.models.stored import save_config
    from pi_lora.scaling.verify import build_on_meta
    from pi_lora.types import silent

    base, run = folder / "base", folder / "run"
    for each in (base, run):
        each.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(BUILTIN_FOLDER / "tiny" / name, each / name)
    config = LlamaConfig(**SIZES[size], max_position_embeddings=2048, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(base)
    found = find(str(base))
    model = build_on_meta(LlamaConfig, found.config)
    weights = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    random = torch.Generator().manual_seed(0)

    def planned(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Planned:
        return Planned(name, dtype, shape, lambda: drawn(shape, dtype, random))

    shards = filled_shards((planned(name, shape, torch.bfloat16) for name, shape in weights.items()), SHARD)
    write_shards(shards, base, silent)
    adapter = []
    for name, (outputs, inputs) in ((name, shape) for name, shape in weights.items() if "_proj" in name):
        module = f"base_model.model.{name.removesuffix('.weight')}"
        adapter.append(planned(f"{module}.lora_A.weight", (RANK, inputs), torch.float32))
        adapter.append(planned(f"{module}.lora_B.weight", (outputs, RANK), torch.float32))
    write_shards([adapter], run, silent)
    (run / "model.safetensors").rename(run / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-2] for name in weights if "_proj" in name})
    settings = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    settings.save_pretrained(run)
    save_config(found.extended(Extension(8192)).config, run)


def drawn(shape: tuple[int, ...], dtype: object, random: object) -> Iterator[object]:
    """Weights as models begin with, some rows at a time; norms are ones."""
    import torch

    from pi_lora.merging.shards import spans

    for start, stop in spans(shape):
        rows = (stop - start, *shape[1:])
        yield (
            torch.ones(rows, dtype=dtype) if len(shape) == 1 else (torch.randn(rows, generator=random) * 0.02).to(dtype)
        )


def measured(command: list[str]) -> dict[str, float]:
    """Seconds until all that `command` wrote is on the disk, processor seconds that it took, and its peak memory."""
    os.sync()
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command}: exit status {process.returncode}")
    os.sync()
    return {
        "seconds": round(time.monotonic() - begin, 2),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1.1b")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.size, options.make)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        needed = 2.2 * 26e9 if options.size == "13b" else 2.2 * 2.2e9
        if (free := shutil.disk_usage(folder).free) < needed:
            raise SystemExit(f"{folder}: needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free; give --folder")
        # The kernel counts the memory of a process from before it became another program: this one stays small.
        making = [sys.executable, __file__, "--size", options.size, "--make", name]
        subprocess.run(making, check=True, stdout=subprocess.DEVNULL)
        base, run = folder / "base", folder / "run"
        merge = [sys.executable, "-m", "pi_lora", "merge", str(run), "--output", str(folder / "merged")]
        ways = {
            "pi-lora merge --no-verify": [*merge, "--no-verify"],
            "of which imports": [sys.executable, "-c", IMPORTS],
        }
        if options.size == "1.1b":
            ways |= {
                "PEFT merge_and_unload + save_pretrained": [
                    *(sys.executable, "-c", PEFT),
                    *(str(base), str(run), str(folder / "merged")),
                ],
                "cp": ["cp", "-r", str(base), str(folder / "merged")],
                "pi-lora merge": merge,
            }
        found = {}
        for way, command in ways.items():
            found[way] = measured(command)
            print(f"{way}: {found[way]['seconds']:.1f} s, {found[way]['peak_bytes'] / 1e9:.2f} GB", flush=True)
            shutil.rmtree(folder / "merged", ignore_errors=True)
    sys.path.insert(0, str(ROOT / "scripts"))
    from machine import machine

    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**kept, options.size: {"machine": machine(), **found}}, indent=2) + "\n")


if __name__ == "__main__":
    main()
