"""Job to run folder: the story of a training, through TRL's SFTTrainer; the only home of TRL."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler
from transformers import PrinterCallback, TrainerCallback, set_seed

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports usage otherwise

from trl import SFTConfig, SFTTrainer

from pi_lora.data.tokens import tokenizer_identity
from pi_lora.distributed import from_all, is_leader, join_processes, number_of_processes, wait_for_all
from pi_lora.errors import Interrupted
from pi_lora.models import adapter as adapters
from pi_lora.models import machine
from pi_lora.models.device import device
from pi_lora.models.stored import save_config
from pi_lora.models.tokenizer import save_tokenizer
from pi_lora.models.weights import Placement
from pi_lora.recipe.files import RECIPE_FILE, dump_recipe
from pi_lora.report.card import write_card
from pi_lora.run import CHECKPOINTS, Run, staged, staging_path
from pi_lora.training.callbacks import TrainingLog, TrainingScores, ends_after_the_step
from pi_lora.training.chunked_mlp import chunk_mlps
from pi_lora.training.job import Job, rate_share
from pi_lora.training.libraries import libraries_speak_into
from pi_lora.types import Progress, silent
from pi_lora.writing import write_whole


def train(job: Job, progress: Progress = silent) -> Path:
    """Extend the base model of `job` to its target window, tune it, and save the run whole or not at all. `progress` is
    called with the step, the number of steps, and a line about the loss and speed.
    """
    join_processes(cpu=device().type == "cpu")
    data = job.prepare(progress)
    with _staged_by_the_leader(job) as staging, libraries_speak_into(staging):
        run = Run(staging)
        if is_leader():
            origin = job.model.origin(tokenizer_identity(job.model.tokenizer), data.digest)
            run.check_same_origin(job.output, origin, job.permissions)
            write_whole(staging / RECIPE_FILE, dump_recipe(job.recipe))
            run.record({"origin": origin.model_dump()})
        set_seed(job.recipe.training.seed)
        model, batch = _prepared_model(job), job.recipe.training.global_batch_size
        log = TrainingLog(staging, data.tokens * batch if isinstance(data.tokens, int) else None, progress)
        autocast = machine.measured_under_autocast(job.recipe)
        loaded = job.model.being_tuned(str(job.output), model, autocast)
        asked, scores = job.recipe.evaluation, list[TrainerCallback]()
        if asked.every:
            # With the kernel of a model that is loaded.
            kernel = job.model.attention("auto", machine.dtype_of_base(job.recipe) == torch.bfloat16)
            scores.append(TrainingScores(asked, loaded, staging, log, kernel))
        with adapters.without_known_warnings(), ends_after_the_step(log):
            trainer = Trainer(job, model, staging, log, scores)
            start = _checkpoint_to_resume(run) if job.resume else None
            trainer.train(resume_from_checkpoint=str(start) if start else None)
            if log.stopped:
                kept = f"interrupted after step {log.step}, a checkpoint is kept"
                raise Interrupted(f"{job.output}: {kept}; continue with --resume")
            # A signal that comes while the finished run is saved waits for its end, too.
            problem = _save(job, trainer, model, run)
    if is_leader():
        # Only now: until the run stands under its name, they are all that is left of it if the process is killed.
        shutil.rmtree(job.output / CHECKPOINTS, ignore_errors=True)
    if problem:
        raise problem
    return job.output


def _checkpoint_to_resume(run: Run) -> Path | None:
    """The checkpoint that the leader finds undamaged, in every process."""
    found, said = run.checkpoint_to_resume() if is_leader() else (None, [])
    for line in said:
        print(line, file=sys.stderr)
    return from_all([found])[0]


@contextmanager
def _staged_by_the_leader(job: Job) -> Iterator[Path]:
    """`staged`, once for all processes; several machines need an output folder that they share."""
    waiting = nullcontext(staging_path(job.output))
    with staged(job.output, job.resume) if is_leader() else waiting as staging:
        wait_for_all()
        yield staging


def _prepared_model(job: Job) -> Any:
    """Load the model and make trainable what trains. A quantized one goes to every device; others are spread by FSDP
    from the host memory of the first process, which alone reads them, or copied by data parallelism.
    """
    recipe, several = job.recipe, number_of_processes() > 1
    place: Placement = "quantized" if recipe.tuning.method == "qlora" else "host" if several else "device"
    if place == "host" and recipe.sharded and not is_leader():
        place = "empty"
    model = job.model.load_weights(machine.dtype_of_base(recipe), job.attention, place)
    if recipe.sharded and several:
        # transformers reads the weights of some modules in float32, whatever the dtype.
        dtypes = from_all([{name: weight.dtype for name, weight in model.named_parameters()}])[0]
        for name, weight in model.named_parameters():
            weight.data = weight.data.to(dtypes[name])
    if job.model.adapter is not None:
        if is_leader():
            job.model.check_origin()
        tuned = adapters.tune_further(model, job.model.adapter, recipe.tuning)
    else:
        tuned = adapters.prepare_for_tuning(model, recipe.tuning, recipe.model.name, recipe.model.revision)
    if recipe.sharded and recipe.tuning.method == "lora":
        adapters.keep_ties(tuned)
    return tuned


def _save(job: Job, trainer: Any, model: Any, run: Run) -> Exception | None:
    """Save what was tuned; an error in the card, which can be written again, loses nothing and is returned."""
    # Gathering what FSDP has spread takes every process; writing it takes one.
    weights = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None
    if is_leader():
        save = adapters.save_full if job.recipe.tuning.method == "full" else adapters.save_adapter
        folder = run.path
        save(trainer.model, folder, weights)
        if job.needs_its_config:
            adapters.refuse_the_plain_base(folder)
        save_config(job.model.config, folder)
        save_tokenizer(job.model.tokenizer, folder)
        facts = {
            "original": job.original,
            "trainable_parameters": model.num_parameters(only_trainable=True),
            "attention": job.attention,
            **run.log[-1],
            "versions": machine.versions(),
            "hardware": machine.hardware(),
        }
        run.record(facts)
        try:
            write_card(folder)
        except Exception as problem:
            return problem
    return None


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
        bf16=machine.computes_in_bfloat16(job.recipe),
        use_cpu=device().type == "cpu",
        gradient_checkpointing=training.activation_checkpointing,
        gradient_checkpointing_kwargs={"offload": True} if hardware.offload_activations else None,
        # Every trainable parameter is used in every step.
        ddp_find_unused_parameters=False,
        # FSDP2 keeps whole gradients until it has summed them over all processes.
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": job.recipe.sharded}},
        loss_type="nll",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        include_num_input_tokens_seen="non_padding" if job.recipe.data.has_examples else "no",
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
        run_name=job.output.name,
        disable_tqdm=True,
        **dict.fromkeys(("log_level", "log_level_replica"), "error"),
    )
    # A machine may have more GPUs than the recipe asks for; the Trainer would spread a single process over all of them.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


class Trainer(SFTTrainer):
    """SFTTrainer with our schedule, batches of similar lengths, checked losses, and checkpoints marked when whole."""

    def __init__(
        self, job: Job, model: Any, staging: Path, log: TrainingLog, others: Sequence[TrainerCallback] = ()
    ) -> None:
        data, self.training, self.log_of_losses = job.prepare(), job.recipe.training, log
        # PEFT's casts change no number then but of dropout and DoRA's norms, which depend on the dtype.
        tuning = job.recipe.tuning
        self.cast_by_autocast = machine.computes_in_bfloat16(job.recipe) and not (tuning.dropout or tuning.dora)
        self.groups: Sampler[int] | None = data.groups(job.sequences_at_once, self.training.seed)
        if job.recipe.model.kernels == "liger":
            machine.use_liger(model)
        if self.training.mlp_chunk_tokens:
            chunk_mlps(model, self.training.mlp_chunk_tokens)
        # TensorBoard's events go into the run; by default they are removed with the checkpoints.
        with patch_environment(tensorboard_logging_dir=staging / "tensorboard"), adapters.kept_values(model):
            super().__init__(
                model=model,
                args=trainer_arguments(job, staging),
                data_collator=data.collate,
                train_dataset=data.rows,
                processing_class=job.model.tokenizer,
                callbacks=[log, *others],
            )
        self.remove_callback(PrinterCallback)
        # Without a mask torch chooses its fast kernel; FlashAttention leaves padding out by itself, and the loss that
        # balances experts counts what the mask says.
        balances_experts = bool(job.model.config.get("output_router_logits"))
        self.unmasked = job.recipe.data.has_examples and job.attention == machine.SDPA and not balances_experts
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
        """Follow the recipe's schedule."""
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, rate_share(self.training))
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        return self.groups or super()._get_train_sampler(train_dataset)

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *others: Any) -> torch.Tensor:
        """Unmask the padding of examples, leave out the casts by PEFT that autocast makes superfluous, and let the log
        see the loss. Padding is on the right, where causality hides it from every token, and has no label. The trainer
        counts tokens by the mask of its own `inputs`.
        """
        if self.unmasked:
            inputs = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
        with adapters.disable_input_dtype_casting(self.model, self.cast_by_autocast):
            loss: torch.Tensor = super().training_step(model, inputs, *others)
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
            Run(Path(self.args.output_dir).parent).mark_complete(
                Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            )
