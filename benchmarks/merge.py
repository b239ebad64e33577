"""`pi-lora merge` against PEFT's `merge_and_unload` + `save_pretrained`, and against `cp`: time and memory.

    python benchmarks/merge.py

A random LLaMA of 1.1 billion parameters in bfloat16, in shards of 500 MB, with an adapter of rank 16 on all linear
layers. Every way is a process of its own, timed with its imports and until all is on the disk (`sync`); peak memory is
what the kernel counted for that process. Works in a temporary folder, in 7 GB. The result goes to
benchmarks/results/.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import record  # noqa: F401  first: it finds scripts/
from machine import machine
from record import add_tokenizer, apart, cost_of, parser_of, write

SHARD = "500MB"
PEFT = f"""
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
PeftModel.from_pretrained(model, sys.argv[2]).merge_and_unload().save_pretrained(sys.argv[3], max_shard_size="{SHARD}")
"""
# What `pi-lora merge` imports before it reads anything, without looking for garbage as it does.
IMPORTS = """
import gc
gc.disable()
import pi_lora.merging.merging, transformers.models.llama.modeling_llama
gc.freeze()
"""


def make(folder: Path) -> None:
    """A base of random weights, and a run on it with random adapters."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    base = folder / "base"
    run = folder / "run"
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        num_hidden_layers=22,
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(base, max_shard_size=SHARD)
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, adapter).float()
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.02)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(run)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": 4.0}
    config.save_pretrained(run)
    add_tokenizer(base)
    add_tokenizer(run)


def main() -> None:
    parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        apart(make, folder)
        base = str(folder / "base")
        run = str(folder / "run")
        merged = str(folder / "merged")
        merge = [sys.executable, "-m", "pi_lora", "merge", run, "--output", merged]
        ways = {
            "pi-lora merge --check none": [*merge, "--check", "none"],
            "of it imports": [sys.executable, "-c", IMPORTS],
            "PEFT merge_and_unload + save_pretrained": [sys.executable, "-c", PEFT, base, run, merged],
            "cp": ["cp", "-r", base, merged],
            "pi-lora merge": merge,
        }
        costs = {}
        for way, command in ways.items():
            cost = cost_of(command)
            costs[way] = cost
            print(f"{way}: {cost['seconds']:.1f} s, {cost['peak_bytes'] / 1e9:.2f} GB", flush=True)
            shutil.rmtree(merged, ignore_errors=True)
    write("merge", {"machine": machine(), "ways": costs})


if __name__ == "__main__":
    main()
