"""One contender in a process of its own: a few steps of one trainer, timed by a callback, then the process ends.

    python contender.py ROW.json STEPS CAP CONTENDER RECIPE.yaml

pi-lora runs as a user runs it. Whatever trains, transformers' trainer runs it: the clock begins with its first step,
and peak memory counts from there, without loading and quantizing. CAP is the share of the card's memory.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PI_LORA = "pi-lora"
PLAIN = "TRL + PEFT"
UNSLOTH = "Unsloth"
COMPILED = "pi-lora, torch.compile of each layer"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def time_the_trainer(file: Path, steps: int) -> None:
    """Add a callback to every trainer that writes seconds, losses and peaks of `steps` steps and ends the process."""
    import torch
    from transformers import Trainer, TrainerCallback

    on_gpu = torch.cuda.is_available()

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.seconds: list[float] = []
            self.losses: list[float] = []
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            self.last = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds.append(now - self.last)
            self.last = now

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            self.losses.append(logs["loss"])
            if state.global_step < steps:
                return
            row: dict[str, Any] = {"step_seconds": self.seconds, "losses": self.losses}
            if on_gpu:
                row["peak_bytes"] = torch.cuda.max_memory_allocated()
                row["reserved_bytes"] = torch.cuda.max_memory_reserved()
            file.write_text(json.dumps(row))
            os._exit(0)

    train = Trainer.train

    def train_with_clock(trainer: Any, *arguments: Any, **options: Any) -> Any:
        trainer.add_callback(Clock())
        return train(trainer, *arguments, **options)

    Trainer.train = train_with_clock


def compile_layers() -> None:
    """Compile each layer when training begins, for which pi-lora has no key."""
    from transformers import Trainer
    from transformers.modeling_layers import GradientCheckpointingLayer

    train = Trainer.train

    def train_compiled(trainer: Any, *arguments: Any, **options: Any) -> Any:
        for module in trainer.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.compile()
        return train(trainer, *arguments, **options)

    Trainer.train = train_compiled


def train_with_pi_lora(recipe: Path, folder: str) -> None:
    """Run `pi-lora train`."""
    from pi_lora.__main__ import main

    sys.argv = ["pi-lora", "train", str(recipe), "--force", "--output", f"{folder}/run"]
    main()


def train_with_trl(recipe_file: Path, folder: str, unsloth: bool) -> None:
    """Train as the documentation of TRL and PEFT, or of Unsloth, has it: on the same model, tokens, method and rank."""
    if unsloth:
        from unsloth import FastLanguageModel  # before trl, which it changes
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    from pi_lora.recipe.files import load_recipe

    recipe = load_recipe(recipe_file).recipe
    base = recipe.model.name
    tokens = recipe.context.target
    rank = recipe.tuning.rank
    alpha = recipe.tuning.lora_alpha
    quantized = recipe.tuning.method == "qlora"
    adapter: LoraConfig | None = None
    if unsloth:
        model, _ = FastLanguageModel.from_pretrained(base, max_seq_length=tokens, load_in_4bit=quantized)
        model = FastLanguageModel.get_peft_model(
            model,
            r=rank,
            lora_alpha=alpha,
            target_modules=LINEAR,
            use_gradient_checkpointing="unsloth",
        )
    else:
        adapter = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        nf4 = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
        )
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.bfloat16, quantization_config=nf4 if quantized else None, device_map="auto"
        )
    sequences = recipe.training.global_batch_size
    rows = recipe.training.steps * sequences
    ids = torch.randint(0, model.config.vocab_size, (rows, tokens)).tolist()
    arguments = SFTConfig(
        output_dir=folder,
        max_steps=recipe.training.steps,
        per_device_train_batch_size=sequences,
        learning_rate=recipe.training.learning_rate,
        gradient_checkpointing=True,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=adapter,
    ).train()


def main() -> None:
    file, steps, cap, contender, recipe = sys.argv[1:]
    if contender == UNSLOTH:
        import unsloth  # noqa: F401
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(float(cap))
    time_the_trainer(Path(file), int(steps))
    if contender == COMPILED:
        compile_layers()
    with tempfile.TemporaryDirectory() as folder:
        if contender in (PLAIN, UNSLOTH):
            train_with_trl(Path(recipe), folder, unsloth=contender == UNSLOTH)
        else:
            train_with_pi_lora(Path(recipe), folder)


if __name__ == "__main__":
    main()
