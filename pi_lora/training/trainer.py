"""The trainer: TRL's SFTTrainer with its arguments and our schedule; the only home of TRL."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports usage otherwise

from trl import SFTConfig, SFTTrainer

from pi_lora.distributed import is_leader, wait_for_all
from pi_lora.models.base import device
from pi_lora.recipe.schema import Training
from pi_lora.run_folder import CHECKPOINTS, mark_complete
from pi_lora.training.chunked_mlp import chunk_mlps
from pi_lora.training.job import Job
from pi_lora.training.log import TrainingLog
from pi_lora.training.schedule import rate_share

TENSORBOARD = "tensorboard"


def make_trainer(
    job: Job, model: Any, staging: Path, log: TrainingLog, others: Sequence[TrainerCallback] = ()
) -> SFTTrainer:
    """Return a trainer for `model` on the data of `job`, which keeps its checkpoints in `staging`."""
    training, data = job.recipe.training, job.prepare()
    if training.mlp_chunk_tokens:
        chunk_mlps(model, training.mlp_chunk_tokens)
    trainer = _Trainer(
        training,
        log,
        data.groups(job.sequences_at_once, training.seed),
        model=model,
        args=trainer_arguments(job, staging),
        data_collator=data.collate,
        train_dataset=data.rows,
        processing_class=job.tokenizer,
        callbacks=[log, *others, *_tensorboard(training, staging)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trainer_arguments(job: Job, staging: Path) -> SFTConfig:
    """Return TRL's arguments; rows are token ids already, and the loss is computed in chunks without all logits."""
    training, hardware = job.recipe.training, job.recipe.hardware
    arguments = SFTConfig(
        output_dir=str(staging / CHECKPOINTS),
        max_steps=training.steps,
        learning_rate=training.learning_rate,
        per_device_train_batch_size=training.per_device_batch_size,
        gradient_accumulation_steps=training.global_batch_size // job.sequences_at_once,
        optim={"adamw": "adamw_torch_fused", "paged_adamw_8bit": "paged_adamw_8bit"}[training.optimizer],
        weight_decay=training.weight_decay,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        max_grad_norm=training.max_grad_norm,
        bf16=job.in_bfloat16,
        use_cpu=device().type == "cpu",
        gradient_checkpointing=training.activation_checkpointing,
        gradient_checkpointing_kwargs={"offload": True} if hardware.offload_activations else None,
        # Every trainable parameter is used in every step.
        ddp_find_unused_parameters=False,
        loss_type="nll",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        include_num_input_tokens_seen="non_padding" if job.recipe.data.has_examples else "no",
        # TRL does not count position_ids among the columns that are used, nor those of examples.
        remove_unused_columns=False,
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=training.save_every,
        # Two, since the newest may be half written when the process is killed.
        save_total_limit=2,
        seed=training.seed,
        data_seed=training.seed,
        report_to=[tracker for tracker in training.tracking if tracker != TENSORBOARD] or "none",
        run_name=job.output.name,
        disable_tqdm=True,
        **dict.fromkeys(("log_level", "log_level_replica"), "error"),
    )
    # A machine may have more GPUs than the recipe asks for; the Trainer would spread a single process over all of them.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


class _Trainer(SFTTrainer):
    """SFTTrainer with our schedule, batches of similar lengths, a check on losses, and a mark on whole checkpoints."""

    def __init__(self, training: Training, log: TrainingLog, groups: Sampler[int] | None, **arguments: Any) -> None:
        self.training, self.log_of_losses, self.groups = training, log, groups
        super().__init__(**arguments)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, rate_share(self.training))
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        return self.groups or super()._get_train_sampler(train_dataset)

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **named)
        self.log_of_losses.saw(loss)
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.log_of_losses.saw(torch.as_tensor(norm))
        return norm

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        wait_for_all()
        if is_leader():
            mark_complete(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")


def _tensorboard(training: Training, staging: Path) -> Iterator[TensorBoardCallback]:
    """Write TensorBoard's events into the run; by default they are removed with the checkpoints."""
    if TENSORBOARD in training.tracking and is_leader():
        from torch.utils.tensorboard import SummaryWriter  # an optional package

        yield TensorBoardCallback(SummaryWriter(str(staging / TENSORBOARD)))
