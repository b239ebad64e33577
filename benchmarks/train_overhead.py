"""What `pi-lora train` costs over a bare SFTTrainer: tokens a second of both on the demo, in turns, in one run.

    python benchmarks/train_overhead.py [--steps 60] [--rounds 3]

The bare script is what TRL's documentation would have one write: the same model, adapter, sequences and settings, no
more. Each turn is a process of its own; the first ten steps are not counted. JSON goes to benchmarks/results/.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "train_overhead.json"
RECIPE = ROOT / "recipes" / "demo.yaml"
WARM = 10


def bare(steps: int) -> float:
    """Tokens a second of a plain TRL and PEFT script on the demo's model, adapter, sequences and settings."""
    import transformers
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from pi_lora.data.packing import training_sequences
    from pi_lora.models.base import BUILTIN_FOLDER
    from pi_lora.models.device import has_fast_bfloat16
    from pi_lora.recipe.files import load_recipe

    transformers.logging.set_verbosity_error()
    recipe = load_recipe(RECIPE).recipe
    training, folder = recipe.training, BUILTIN_FOLDER / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    packed = training_sequences(recipe.data, tokenizer, 256, 1024, steps * training.global_batch_size)
    rows = [row["input_ids"].tolist() for row in packed]
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "linear", "factor": 4.0}
    ends = {}

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ends[state.global_step] = time.monotonic()

    whole = ["embed_tokens", "input_layernorm", "post_attention_layernorm", "norm"]
    with tempfile.TemporaryDirectory() as output:
        SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, config=config, dtype="float32"),
            args=SFTConfig(
                output_dir=output,
                max_steps=steps,
                learning_rate=training.learning_rate,
                lr_scheduler_type="linear",
                warmup_steps=training.warmup_steps,
                per_device_train_batch_size=training.per_device_batch_size,
                gradient_accumulation_steps=1,
                adam_beta2=training.betas[1],
                bf16=has_fast_bfloat16(),
                use_cpu=True,
                gradient_checkpointing=False,
                max_length=None,
                dataset_kwargs={"skip_prepare_dataset": True},
                logging_steps=training.log_every,
                save_steps=training.save_every,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=recipe.tuning.rank,
                lora_alpha=recipe.tuning.lora_alpha,
                target_modules="all-linear",
                modules_to_save=whole,
                ensure_weight_tying=True,
                task_type="CAUSAL_LM",
            ),
            callbacks=[Clock()],
        ).train()
    return (steps - WARM) * training.global_batch_size * 1024 / (ends[steps] - ends[WARM])


def ours(steps: int) -> float:
    """Tokens a second of `pi-lora train` on the demo, by its own log."""
    with tempfile.TemporaryDirectory() as output:
        run = Path(output) / "run"
        command = ["train", str(RECIPE), f"training.steps={steps}", "--output", str(run)]
        subprocess.run([sys.executable, "-m", "pi_lora", *command], check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "training.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["step"] == WARM)
    return (lines[-1]["tokens"] - first["tokens"]) / (lines[-1]["seconds"] - first["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        print(json.dumps(bare(options.steps)))
        return
    rounds = []
    for _ in range(options.rounds):
        mine = ours(options.steps)
        command = [sys.executable, __file__, "--bare", "--steps", str(options.steps)]
        theirs = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        rounds.append({"pi_lora": round(mine, 1), "bare": round(theirs, 1), "ratio": round(mine / theirs, 4)})
        print(rounds[-1])
    sys.path.insert(0, str(ROOT / "scripts"))
    from machine import machine

    ratio = statistics.median(each["ratio"] for each in rounds)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "steps": options.steps, "rounds": rounds, "median_ratio": ratio}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(f"median: {ratio:.3f} of the bare script's tokens a second; {RESULTS}")


if __name__ == "__main__":
    main()
