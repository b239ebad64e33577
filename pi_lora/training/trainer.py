"""TRL's SFTTrainer with our schedule, batches of similar lengths, and checked losses; the only home of TRL."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Sampler
from transformers import PrinterCallback
from transformers import Trainer as PlainTrainer

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports usage otherwise

from trl import SFTConfig, SFTTrainer
from trl.models import enable_selective_activation_checkpointing

from pi_lora.data.batches import LengthGroups, TrainingData, collate
from pi_lora.errors import ModelError
from pi_lora.models import adapter as adapters
from pi_lora.models import machine
from pi_lora.models.machine import device
from pi_lora.models.model import Model
from pi_lora.planning.planning import plan_here
from pi_lora.recipe.schema import Recipe
from pi_lora.run import CHECKPOINTS, Run
from pi_lora.training.callbacks import Monitor


def trainer_arguments(recipe: Recipe, run: Run, name: str) -> SFTConfig:
    """Return TRL's arguments; rows are token ids already."""
    training, precision = recipe.training, machine.computes_in(recipe)
    # Which layers transformers checkpoints, and where it keeps their inputs.
    every = training.activation_checkpointing
    checkpointing: dict[str, Any] = {}
    if recipe.hardware.offload_activations:
        checkpointing = {"offload": True}
    elif isinstance(every, int) and every > 1:
        checkpointing = {"every_n_layers": every}
    return OneDevice(
        output_dir=str(run.path / CHECKPOINTS),
        max_steps=training.steps,
        learning_rate=training.learning_rate,
        per_device_train_batch_size=training.per_device_batch_size,
        gradient_accumulation_steps=training.global_batch_size // recipe.sequences_at_once,
        optim="adamw_torch_fused" if training.optimizer == "adamw" else training.optimizer,
        weight_decay=training.weight_decay,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        max_grad_norm=training.max_grad_norm,
        lr_scheduler_type=training.schedule,
        lr_scheduler_kwargs=training.schedule_options,
        warmup_steps=training.warmup_steps,
        bf16=precision == "bfloat16",
        fp16=precision == "float16",
        use_cpu=device().type == "cpu",
        gradient_checkpointing=bool(every),
        gradient_checkpointing_kwargs=checkpointing or None,
        # Every trainable parameter is used in every step.
        ddp_find_unused_parameters=False,
        # FSDP2 keeps whole gradients until it has summed them over all processes.
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": recipe.sharded}},
        loss_type="nll",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        include_num_input_tokens_seen="non_padding" if recipe.data.has_examples or recipe.data.keep_short else "all",
        # TRL does not count position_ids among the columns that are used, nor those of examples.
        remove_unused_columns=False,
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,
        save_steps=training.save_every,
        # Two, since the newest may be half written when the process is killed.
        save_total_limit=2,
        seed=training.seed,
        data_seed=training.seed,
        report_to=list(training.tracking) or "none",
        run_name=name,
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )


class OneDevice(SFTConfig):
    """Arguments of a process that computes on one GPU: the Trainer would spread it over all that a machine has."""

    @property
    def n_gpu(self) -> int:
        """How many GPUs this process computes on."""
        return min(1, int(super().n_gpu))


class Trainer(SFTTrainer):
    """SFTTrainer with our schedule, batches of similar lengths, the loss that the plan chose, and checked losses."""

    def __init__(self, recipe: Recipe, model: Model, data: TrainingData, run: Run, monitor: Monitor) -> None:
        self.training, self.monitor, tuned = recipe.training, monitor, model.model
        # PEFT's casts change no number then but of dropout, which depends on the dtype.
        tuning = recipe.tuning
        self.cast_by_autocast = machine.computes_in(recipe) != "float32" and not tuning.dropout
        plan = plan_here(recipe, model.permissions)
        self.plain_loss = plan is not None and plan.memory.plain_loss
        self.groups: Sampler[int] | None = None
        if len(set(data.tokens)) > 1:
            self.groups = LengthGroups(recipe.sequences_at_once, lengths=data.tokens)
        if recipe.model.kernels == "liger":
            machine.use_liger(tuned)
        if self.training.mlp_chunk_tokens:
            chunk_mlps(tuned, self.training.mlp_chunk_tokens)
        if self.training.activation_checkpointing == "selective":
            # TRL's own key fails for models with an adapter.
            enable_selective_activation_checkpointing(tuned if tuning.method == "full" else tuned.get_base_model())
        # TensorBoard's events go into the run; by default they are removed with the checkpoints.
        with patch_environment(tensorboard_logging_dir=run.path / "tensorboard"), adapters.kept_values(tuned):
            super().__init__(
                model=tuned,
                args=trainer_arguments(recipe, run, model.name),
                data_collator=partial(collate, padding=data.padding),
                train_dataset=data.rows,
                processing_class=model.tokenizer,
                callbacks=[monitor],
            )
        self.remove_callback(PrinterCallback)
        # Without a mask torch chooses its fast kernel; FlashAttention leaves padding out by itself, and the loss that
        # balances experts counts what the mask says.
        balances_experts = bool(model.config.get("output_router_logits"))
        self.unmasked = recipe.data.has_examples and model.kernel == machine.SDPA and not balances_experts
        if self.is_fsdp_enabled:
            self._sum_in_float32()

    def _sum_in_float32(self) -> None:
        """Compute in bfloat16, if at all, but sum gradients and return losses in float32, for which accelerate 1.15 has
        no flag. Without an `output_dtype` layers return what they compute in.
        """
        plugin = self.accelerator.state.fsdp_plugin
        plugin.cpu_ram_efficient_loading = True  # processes without weights wait for them
        if self.args.bf16:
            plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """Follow transformers' schedule, after a linear warm-up from `warmup_start` (paper.tex, section 3.1)."""
        training, after_warmup = self.training, super().create_scheduler(num_training_steps, optimizer).lr_lambdas[0]

        def share(step: int) -> float:
            if step < training.warmup_steps:
                return training.warmup_start + (1 - training.warmup_start) * step / training.warmup_steps
            return float(after_warmup(step))

        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, share)
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        return self.groups or super()._get_train_sampler(train_dataset)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *others: Any, **options: Any) -> Any:
        """Take the model's own loss, from all logits, where the plan chose it instead of TRL's in chunks."""
        if self.plain_loss:
            return PlainTrainer.compute_loss(self, model, {**inputs, "use_cache": False}, *others, **options)
        return super().compute_loss(model, inputs, *others, **options)

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *others: Any) -> torch.Tensor:
        """Unmask the padding of examples, leave out the casts by PEFT that autocast makes superfluous, and let the log
        see the loss. Padding is on the right, where causality hides it from every token, and has no label. The trainer
        counts tokens by the mask of its own `inputs`.
        """
        if self.unmasked:
            inputs = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
        with adapters.disable_input_dtype_casting(self.model, self.cast_by_autocast):
            loss: torch.Tensor = super().training_step(model, inputs, *others)
        self.monitor.record_loss(loss)
        return loss


def chunk_mlps(model: nn.Module, tokens: int) -> None:
    """Make the MLPs of `model` compute at most `tokens` tokens at a time, forward and backward. The four tensors of
    tokens x intermediate of an MLP, the largest of a layer under activation checkpointing, then exist for one piece of
    the sequence only.
    """
    mlps = [module for name, module in model.named_modules() if name.rpartition(".")[2] in ("mlp", "feed_forward")]
    dense = [mlp for mlp in mlps if not any(name.rpartition(".")[2] == "experts" for name, _ in mlp.named_modules())]
    if not dense:
        raise ModelError("training.mlp_chunk_tokens: the model has no dense MLP; leave the key out")
    for mlp in dense:
        mlp.forward = _in_pieces(mlp.forward, tokens)


def _in_pieces(run: Callable[[torch.Tensor], torch.Tensor], tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        pieces = torch.split(hidden.reshape(1, -1, hidden.shape[-1]), tokens, dim=1)
        if len(pieces) == 1:
            return run(hidden)
        outputs = [checkpoint(alone, piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        return torch.cat(outputs, dim=1).view(hidden.shape)

    def alone(piece: torch.Tensor) -> torch.Tensor:
        # With one cast of a weight for all pieces, its gradients would be summed in bfloat16.
        device = piece.device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        with torch.autocast(device, dtype, enabled=enabled, cache_enabled=False):
            return run(piece)

    return forward
