"""The trainer that a script would have without pi-lora: as the documentation of TRL and PEFT has it, and no more."""

from typing import Any

import torch
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from pi_lora.models.device import has_fast_bfloat16
from pi_lora.recipe.schema import Recipe


def bare_trainer(
    recipe: Recipe, model: Any, tokenizer: Any, *, output: str, saved: list[str] | None = None, **options: Any
) -> Any:
    """Return an SFTTrainer of a LoRA adapter with the settings of a recipe; it also trains the modules `saved`."""
    training = recipe.training
    return SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=output,
            max_steps=training.steps,
            learning_rate=training.learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=training.warmup_steps,
            per_device_train_batch_size=training.per_device_batch_size,
            gradient_accumulation_steps=training.global_batch_size // training.per_device_batch_size,
            adam_beta2=training.betas[1],
            bf16=has_fast_bfloat16(),
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=training.activation_checkpointing is True,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            seed=training.seed,
            logging_steps=1,
            save_steps=training.save_every,
            report_to="none",
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=recipe.tuning.rank,
            lora_alpha=recipe.tuning.lora_alpha,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            modules_to_save=saved,
            ensure_weight_tying=saved is not None,
        ),
        **options,
    )
