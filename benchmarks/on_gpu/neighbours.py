"""The neighbours, on the same shape, tokens, method and rank: plain TRL and PEFT, and Unsloth where it is installed."""

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from on_gpu.setting import Setting, random_model
from on_gpu.training import Clock, Row, about, job_of, measured, steps_at, synthetic
from pi_lora.models.device import device, has_fast_bfloat16
from pi_lora.recipe.schema import Recipe

PLAIN = "TRL + PEFT"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# What is trained beside the adapter is pi-lora's choice, which the neighbours' scripts do not make.
ADAPTER_ALONE = {"tuning": {"also_train": "nothing"}}


def present() -> list[str]:
    """Those that can run here."""
    return [PLAIN, *(["Unsloth"] if importlib.util.find_spec("unsloth") else [])]


def neighbour(name: str, setting: Setting, method: str, tokens: int, tell: Callable[[Row], None]) -> None:
    """Tell the row of one neighbour."""
    train = {PLAIN: plain, "Unsloth": unsloth}[name]
    recipe = setting.recipe(method, tokens, {**ADAPTER_ALONE, "training": {"steps": steps_at(tokens)}})
    row = measured(lambda clock: train(setting, recipe, clock), recipe, recipe.training.steps)
    # The plan is of pi-lora's trainer.
    tell({key: value for key, value in about(setting, recipe, name).items() if key != "planned_bytes"} | row)


def arguments(recipe: Recipe, folder: str) -> Any:
    """SFTConfig as TRL's documentation writes it, but for what makes the work the same."""
    from trl import SFTConfig

    training = recipe.training
    return SFTConfig(
        output_dir=folder,
        max_steps=training.steps,
        per_device_train_batch_size=training.global_batch_size,
        learning_rate=training.learning_rate,
        gradient_checkpointing=True,
        bf16=has_fast_bfloat16(),
        use_cpu=device().type == "cpu",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def with_labels(data: Any) -> Any:
    """TRL's collator takes lists and wants labels."""
    return data.with_format(None).map(lambda row: {"labels": row["input_ids"]})


def plain(setting: Setting, recipe: Recipe, clock: Clock) -> None:
    """`SFTTrainer(model, peft_config=LoraConfig(...))`, as in TRL's and PEFT's documentation."""
    from peft import LoraConfig
    from trl import SFTTrainer

    model = random_model(setting, recipe.context.target, recipe.tuning.method)
    adapter = LoraConfig(
        r=recipe.tuning.rank,
        lora_alpha=recipe.tuning.lora_alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=model,
            args=arguments(recipe, folder),
            train_dataset=with_labels(synthetic(recipe, model.config.vocab_size)),
            processing_class=job_of(recipe).tokenizer,
            peft_config=None if recipe.tuning.method == "full" else adapter,
            callbacks=[clock],
        ).train()


def unsloth(setting: Setting, recipe: Recipe, clock: Clock) -> None:
    """As Unsloth's documentation writes it; it reads a model from a folder, which is made here. Never run so far."""
    from unsloth import FastLanguageModel  # before trl, which it changes

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        random_model(setting, recipe.context.target, "lora").save_pretrained(base)
        job_of(recipe).tokenizer.save_pretrained(base)
        model, reader = FastLanguageModel.from_pretrained(
            str(base), max_seq_length=recipe.context.target, load_in_4bit=recipe.tuning.method == "qlora"
        )
        model = FastLanguageModel.get_peft_model(
            model,
            r=recipe.tuning.rank,
            lora_alpha=recipe.tuning.lora_alpha,
            target_modules=TARGETS,
            use_gradient_checkpointing="unsloth",
        )
        from trl import SFTTrainer

        SFTTrainer(
            model=model,
            args=arguments(recipe, folder),
            train_dataset=with_labels(synthetic(recipe, setting.config["vocab_size"])),
            processing_class=reader,
            callbacks=[clock],
        ).train()
