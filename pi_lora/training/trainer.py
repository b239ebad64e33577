"""TRL's SFTTrainer with our schedule, batches without padding, and checked losses; the only module that uses TRL."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from transformers import PrinterCallback, TrainerCallback
from transformers import Trainer as PlainTrainer
from transformers.integrations import get_reporting_integration_callbacks
from trl import SFTConfig, SFTTrainer
from trl.models import enable_selective_activation_checkpointing

from pi_lora.data.batches import TrainingData, collate
from pi_lora.models import adapter as adapters
from pi_lora.models import device as devices
from pi_lora.models.attention import BLOCKWISE
from pi_lora.models.device import device
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.shape import dense_mlps
from pi_lora.recipe.schema import Recipe
from pi_lora.run import CHECKPOINTS, Run
from pi_lora.training.loss import compute_loss_in_place

# Settings of `accelerate launch` that a shell may have for other trainings: the recipe decides.
ACCELERATE_DEFAULTS = {
    "accelerate_mixed_precision": "no",
    "accelerate_dynamo_backend": "no",
    "accelerate_use_deepspeed": "false",
    "accelerate_use_megatron_lm": "false",
}


def trainer_arguments(recipe: Recipe, run: Run, name: str, *, balances_experts: bool = False) -> SFTConfig:
    """Return TRL's arguments; rows are token ids already.

    `balances_experts` is whether the config of the model adds the loss that balances experts, which TRL would add to
    the loss of every mixture of experts.
    """
    training = recipe.training
    precision = devices.computes_in(recipe)
    has_padding = recipe.data.has_examples or recipe.data.keep_short
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
        gradient_checkpointing=bool(training.activation_checkpointing),
        gradient_checkpointing_kwargs=_checkpointing_options(recipe),
        # Every trainable parameter is used in every step.
        ddp_find_unused_parameters=False,
        # FSDP2 keeps whole gradients until it has summed them over all processes.
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": recipe.sharded}},
        loss_type="nll",
        router_aux_loss_coef=None if balances_experts else 0.0,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        include_num_input_tokens_seen="non_padding" if has_padding else "all",
        # TRL does not count position_ids among the columns that are used, nor those of examples.
        remove_unused_columns=False,
        logging_steps=training.log_every,
        logging_nan_inf_filter=False,
        save_steps=training.save_every,
        # Two, since the newest may be half written when the process is killed.
        save_total_limit=2,
        seed=training.seed,
        data_seed=training.seed,
        report_to="none",
        run_name=name,
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
    )


def _checkpointing_options(recipe: Recipe) -> dict[str, Any] | None:
    """Return transformers' options of activation checkpointing: every n-th layer, or inputs in host memory."""
    if recipe.hardware.offload_activations:
        return {"offload": True}
    every = recipe.training.activation_checkpointing
    if isinstance(every, int) and every > 1:
        return {"every_n_layers": every}
    return None


class OneDevice(SFTConfig):
    """Arguments of a process that computes on one GPU: the Trainer would use all GPUs of the machine."""

    @property
    def n_gpu(self) -> int:
        """The number of GPUs of this process."""
        return min(1, int(super().n_gpu))


class Trainer(SFTTrainer):
    """SFTTrainer with our schedule, batches without padding, our loss on a CPU, and checked losses."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        model: LoadedModel,
        data: TrainingData,
        run: Run,
        callbacks: Sequence[TrainerCallback],
        record_loss: Callable[[torch.Tensor], None],
    ) -> None:
        self.training = recipe.training
        self.record_loss = record_loss
        tuned = model.module
        # Under autocast the casts of PEFT only change dropout, which depends on the dtype.
        self.cast_by_autocast = devices.computes_in(recipe) != "float32" and not recipe.tuning.dropout
        if recipe.tuning.method == "full":
            # The Trainer of transformers 5.23 loads checkpoints by the names of modules, and ignores the names of
            # earlier versions that `save_pretrained` gives to the weights of composites and experts.
            tuned.save_pretrained = partial(tuned.save_pretrained, save_original_format=False)
        balances_experts = bool(model.source.config.get("output_router_logits"))
        # Only TRL's loss balances experts over accumulated batches, and gathers the head of a sharded model.
        self.loss_in_place = device().type == "cpu" and not (balances_experts or recipe.sharded)
        _change_modules(tuned, recipe, loss_in_place=self.loss_in_place)
        knows_bounds = model.kernel == BLOCKWISE or model.kernel.startswith("flash_attention")
        isolates = knows_bounds and model.source.base.isolates_sequences
        # The events of TensorBoard go into the run; by default they are removed with the checkpoints.
        logs = run.path / "tensorboard"
        with patch_environment(tensorboard_logging_dir=logs, **ACCELERATE_DEFAULTS), adapters.kept_values(tuned):
            super().__init__(
                model=tuned,
                args=trainer_arguments(recipe, run, model.name, balances_experts=balances_experts),
                data_collator=partial(collate, padding=data.padding, isolates=isolates),
                train_dataset=data.rows,
                processing_class=model.tokenizer,
                callbacks=list(callbacks),
            )
            # After the other callbacks: a tracker that fails in the last step loses no weights.
            for tracker in get_reporting_integration_callbacks(list(recipe.training.tracking)):
                self.add_callback(tracker)
        self.remove_callback(PrinterCallback)
        # Without a mask torch chooses its fast kernel. FlashAttention leaves padding out by itself, and the loss that
        # balances experts needs the mask.
        self.unmasked = recipe.data.has_examples and model.kernel in (devices.SDPA, BLOCKWISE) and not balances_experts
        if self.is_fsdp_enabled:
            self._sum_in_float32()

    def _sum_in_float32(self) -> None:
        """Sum gradients and return losses in float32 when FSDP2 computes in bfloat16.

        accelerate 1.15 has no flag for it. Without an `output_dtype` layers return the dtype in which they compute.
        """
        plugin = self.accelerator.state.fsdp_plugin
        plugin.cpu_ram_efficient_loading = True  # processes without weights wait for them
        if self.args.bf16:
            plugin.mixed_precision_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """Follow transformers' schedule, after a linear warm-up from `warmup_start` (paper.tex, section 3.1)."""
        start = self.training.warmup_start
        warmup_steps = self.training.warmup_steps
        after_warmup = super().create_scheduler(num_training_steps, optimizer).lr_lambdas[0]

        def share_of_learning_rate(step: int) -> float:
            if step < warmup_steps:
                return start + (1 - start) * step / warmup_steps
            return float(after_warmup(step))

        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, share_of_learning_rate)
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: dict[str, Any], *others: Any, **options: Any) -> Any:
        """Compute the loss in place on a CPU; elsewhere TRL's, in chunks."""
        if self.loss_in_place:
            return PlainTrainer.compute_loss(self, model, {**inputs, "use_cache": False}, *others, **options)
        return super().compute_loss(model, inputs, *others, **options)

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *others: Any) -> torch.Tensor:
        """Run a step without the attention mask of examples and without superfluous casts by PEFT; record the loss.

        Padding is on the right, where causality hides it from every token, and has no label. The caller counts tokens
        by the mask, which is therefore replaced in a copy of `inputs`.
        """
        if self.unmasked:
            inputs = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
        with adapters.disable_input_dtype_casting(self.model, self.cast_by_autocast):
            loss: torch.Tensor = super().training_step(model, inputs, *others)
        self.record_loss(loss)
        return loss


def _change_modules(model: Any, recipe: Recipe, *, loss_in_place: bool) -> None:
    """Set up the loss of a model, and its kernels, chunks of MLPs and selective checkpointing as the recipe says."""
    base = model if recipe.tuning.method == "full" else model.get_base_model()
    if loss_in_place:
        compute_loss_in_place(base)
    if recipe.model.kernels == "liger":
        devices.use_liger(model)
    if recipe.training.mlp_chunk_tokens:
        chunk_mlps(model, recipe.training.mlp_chunk_tokens)
    if recipe.training.activation_checkpointing == "selective":
        # The key of TRL fails for models with an adapter.
        enable_selective_activation_checkpointing(base)


def chunk_mlps(model: nn.Module, tokens: int) -> None:
    """Make the MLPs of `model` compute at most `tokens` tokens at a time, forward and backward.

    The four tensors of tokens x intermediate of an MLP are the largest of a layer under activation checkpointing. They
    then exist for one chunk of the sequence only.
    """
    for mlp in dense_mlps(model):
        mlp.forward = _in_chunks(mlp.forward, tokens)


def _in_chunks(mlp: Callable[[torch.Tensor], torch.Tensor], tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        chunks = torch.split(flat, tokens, dim=1)
        if len(chunks) == 1:
            return mlp(hidden)
        outputs = [checkpoint(of_chunk, chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        return torch.cat(outputs, dim=1).view(hidden.shape)

    def of_chunk(chunk: torch.Tensor) -> torch.Tensor:
        device_type = chunk.device.type
        enabled = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type)
        # With one cast of a weight for all chunks, the gradients of the weight would be summed in bfloat16.
        with torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=False):
            return mlp(chunk)

    return forward
