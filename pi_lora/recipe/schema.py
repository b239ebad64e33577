"""The schema of a recipe, checked once, and the only home of each default."""

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pi_lora.recipe.data import Data
from pi_lora.recipe.evaluation import Evaluation
from pi_lora.recipe.factors import FactorsOrFile
from pi_lora.recipe.section import LIST, Section, Seed, Texts, Tokens
from pi_lora.scaling.scalings import Method

Dtype = Literal["float32", "bfloat16", "float16"]
Scaling = Literal[Method, "keep"]


class Model(Section):
    """The base model to extend, or an extended model to tune further."""

    name: Annotated[str, Field(min_length=1)]
    """Hub id, folder of weights, run or adapter, or builtin:tiny."""
    revision: str = "main"
    """Branch, tag or commit on the hub."""
    dtype: Dtype | None = None
    """Dtype of the loaded weights. By default chosen by the tuning method."""
    attention: Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "eager"] = "auto"
    """Attention implementation of transformers; auto is sdpa, with sliding windows, sinks and soft caps in blocks."""
    kernels: Literal["transformers", "liger"] = "transformers"
    """Kernels of norms, MLPs and rotary embeddings: transformers' own, or Liger Kernel."""


class Context(Section):
    """The windows in tokens: `original` is L, `target` is L'."""

    target: Tokens
    """Window after tuning, as 16384 or 16k. With `scaling: keep`, the length of the longest example."""
    original: Tokens | None = None
    """Original window of the model. By default the longest sequences of its training, or the window in its config."""
    theta: Annotated[float | None, Field(gt=1)] = None
    """New rope_theta of `scaling: theta`. By default computed by the NTK-aware rule."""
    factors: FactorsOrFile | None = None
    """Divisors of the frequencies under `scaling: factors`: a list, or a file that `pi-lora search` wrote."""

    def conflicts(self) -> Iterator[str]:
        """Yield that there is nothing to extend."""
        if self.target <= (self.original or 0):
            yield f"target {self.target} is not longer than original {self.original}; nothing to extend"


class Tuning(Section):
    """Which weights train, and the shape of the adapter."""

    method: Literal["lora", "qlora", "full"] = "lora"
    """Train an adapter (lora), an adapter on a 4-bit NF4 base (qlora), or all weights (full)."""
    rank: PositiveInt = 16
    """Rank of the adapter's matrices."""
    alpha: PositiveFloat | None = None
    """LoRA's alpha. By default twice the rank."""
    rank_stabilized: bool = False
    """Scale the update by alpha / sqrt(rank) (Kalajdzievski 2023) instead of alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the adapter's inputs."""
    target_modules: Literal["attention", "all-linear"] | Texts = "all-linear"
    """Linear layers that get an adapter. all-linear leaves out routers. Or names of modules, as [q_proj, v_proj]."""
    modules_to_save: Literal["embeddings_and_norms", "norms", "nothing"] = "embeddings_and_norms"
    """Modules that train in full and are saved with the adapter (LongLoRA)."""

    @property
    def target_names(self) -> set[str]:
        """The set of `attention`, of `all-linear`, or of the names of modules."""
        if isinstance(self.target_modules, str):
            return {self.target_modules}
        return set(self.target_modules)

    @property
    def lora_alpha(self) -> float:
        """The `lora_alpha` of PEFT, which scales the update by alpha / rank."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def with_embeddings(self) -> bool:
        """Whether embeddings train in full with the adapter."""
        return self.modules_to_save == "embeddings_and_norms"

    @property
    def with_norms(self) -> bool:
        """Whether norms train in full with the adapter."""
        return self.modules_to_save != "nothing"


class Training(Section):
    """Steps, optimizer and schedule; the defaults are the paper's (section 3.1)."""

    steps: PositiveInt = 1000
    """Optimizer steps."""
    learning_rate: PositiveFloat = 2e-5
    """Maximum learning rate of the schedule."""
    global_batch_size: PositiveInt = 64
    """Sequences per optimizer step, over all processes."""
    per_device_batch_size: PositiveInt = 1
    """Sequences per forward pass of a process."""
    schedule: Literal[
        "constant",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = "constant"
    """Learning rate schedule after the warm-up, by the names of transformers."""
    schedule_options: dict[str, float | int] = Field({})
    """Options of the schedule, for example min_lr_rate or num_decay_steps."""
    warmup_steps: NonNegativeInt = 20
    """Steps over which the learning rate rises linearly."""
    warmup_start: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at step 0, as a share of the maximum."""
    optimizer: Literal["adamw", "paged_adamw_8bit"] = "adamw"
    """Optimizer; paged_adamw_8bit needs a GPU."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW."""
    betas: Annotated[tuple[float, float], LIST] = (0.9, 0.95)
    """Betas of AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the computation. auto: bfloat16 where it is faster; float16 for adapters on GPUs without bfloat16."""
    activation_checkpointing: bool | Literal["selective"] | Annotated[int, Field(ge=2)] = True
    """Recompute layers in the backward pass to save memory. n: every n-th layer; selective: all but attention."""
    mlp_chunk_tokens: PositiveInt | None = None
    """Tokens per chunk of an MLP's input. By default all tokens at once."""
    save_every: PositiveInt = 100
    """Steps between checkpoints. A complete run keeps none."""
    log_every: PositiveInt = 10
    """Steps between lines of training.jsonl."""
    tracking: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], LIST] = ()
    """Experiment trackers to log to as well."""
    seed: Seed = 0
    """Seed of the adapter's initial values, dropout and the order of sequences."""

    def conflicts(self) -> Iterator[str]:
        """Yield that a constant schedule has no options."""
        if self.schedule == "constant" and self.schedule_options:
            yield "schedule_options: have no effect under schedule: constant; name another schedule, or leave them out"

    def checkpointed_layers(self, layers: int) -> int:
        """Return how many of `layers` are recomputed in the backward pass. Every n-th layer includes the first."""
        every = self.activation_checkpointing
        if every is False:
            return 0
        if every is True or every == "selective":
            return layers
        return math.ceil(layers / every)


class Hardware(Section):
    """The GPUs, processes and machines of a run."""

    gpus: PositiveInt | None = None
    """GPUs per machine. By default one process on the device of the machine."""
    gpu: Annotated[str | None, BeforeValidator(lambda name: name if name is None else str(name))] = None
    """GPU to plan for, as H100 or 48GB. By default that of this machine."""
    cpu_processes: PositiveInt | None = None
    """Processes per machine on CPUs, if gpus is left out."""
    machines: PositiveInt = 1
    """Number of machines. Each is started with its own --machine-rank."""
    context_parallel: PositiveInt = 1
    """GPUs that share one sequence."""
    offload_activations: bool = False
    """Keep checkpointed activations in host memory."""

    @property
    def processes_per_machine(self) -> int:
        """One per GPU, or `cpu_processes`."""
        return self.gpus or self.cpu_processes or 1

    @property
    def processes(self) -> int:
        """Processes on all machines."""
        return self.processes_per_machine * self.machines

    @property
    def data_parallel(self) -> int:
        """How many sequences are processed in parallel."""
        return self.processes // self.context_parallel


class Recipe(Section):
    """Everything that determines a run."""

    model: Model
    context: Context
    scaling: Scaling = "pi"
    """Scaling of the rotary frequencies. keep: that of an extended model."""
    tuning: Tuning = Tuning()
    data: Data
    training: Training = Training()
    hardware: Hardware = Hardware()
    evaluation: Evaluation = Evaluation()
    paper: str | None = None
    """Row of the paper's tables that this recipe reproduces."""

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 shards the model over the GPUs. With a quantized base, every GPU holds the whole model."""
        return self.hardware.gpus is not None and self.tuning.method != "qlora"

    @property
    def shards(self) -> int:
        """Devices that share the weights; 1 if every device holds all of them."""
        return self.hardware.processes if self.sharded else 1

    @property
    def sequences_at_once(self) -> int:
        """Sequences of one forward pass, over all processes."""
        return self.training.per_device_batch_size * self.hardware.data_parallel

    @property
    def _takes_float16(self) -> bool:
        """Whether gradients can be scaled, as float16 needs. accelerate 1.15 cannot scale those of sharded weights."""
        return self.tuning.method != "full" and self.shards == 1

    def computes_in(self, on_cpu: bool, has_bfloat16: bool) -> str:
        """Return the dtype in which a training step computes. Weights that train are float32 in any case."""
        if self.training.precision != "auto":
            return self.training.precision
        if has_bfloat16:
            return "bfloat16"
        if on_cpu or not self._takes_float16:
            return "float32"
        return "float16"

    def dtype_of_base(self, on_cpu: bool, has_bfloat16: bool) -> str:
        """Return the dtype of the base model.

        It is float32 for full tuning, which trains these weights, and bfloat16 below a float32 adapter. On a GPU
        without bfloat16, and for QLoRA on a CPU, it is the dtype of the computation. On a CPU, LoRA keeps float32,
        which may be faster there.
        """
        if self.model.dtype:
            return self.model.dtype
        method = self.tuning.method
        if method == "full" or (on_cpu and method == "lora"):
            return "float32"
        computes_in = self.computes_in(on_cpu, has_bfloat16)
        if on_cpu or computes_in == "float16":
            return computes_in
        if has_bfloat16:
            return "bfloat16"
        return "float32"

    def conflicts(self) -> Iterator[str]:
        """Yield keys of different sections that do not fit together."""
        yield from self._tuning_conflicts()
        yield from self._batch_conflicts()
        if self.hardware.context_parallel > 1:
            yield from self._context_parallel_conflicts()
        if self.context.theta is not None and self.scaling != "theta":
            yield f"context.theta: has no effect under scaling: {self.scaling}; use theta, or leave it out"
        if self.context.factors is not None and self.scaling != "factors":
            yield f"context.factors: have no effect under scaling: {self.scaling}; use factors, or leave them out"
        sequence = self.data.sequence_tokens or self.context.target
        if self.data.has_examples and self.data.completion_tokens + 1 >= sequence:
            yield f"data.completion_tokens: leave no room for a prompt in {sequence} tokens; lower them"
        for name in ("perplexity", "context", "summarization"):
            measured = getattr(self.evaluation, name)
            if measured and any(
                source.name == measured.data and source.hold_out != measured.hold_out for source in self.data.source
            ):
                yield f"evaluation.{name}.hold_out: differs from that of the same text in data.source; make them equal"
        if self.scaling == "keep" and self.data.positions == "pose" and self.data.sequence_tokens is None:
            yield "data.positions: pose: needs data.sequence_tokens with scaling: keep; add it"

    def _tuning_conflicts(self) -> Iterator[str]:
        """Yield keys that do not fit the tuning method or the adapter, and offloading without checkpointing."""
        training = self.training
        if self.tuning.method == "full" and self.model.dtype not in (None, "float32"):
            yield f"model.dtype: {self.model.dtype} weights would round most updates of full tuning away; leave it out"
        if self.hardware.offload_activations and training.activation_checkpointing is not True:
            yield "hardware.offload_activations: needs training.activation_checkpointing: true"
        if training.mlp_chunk_tokens and self.tuning.dropout:
            yield "training.mlp_chunk_tokens: cannot repeat dropout; leave it or tuning.dropout out"
        if training.precision == "float16" and not self._takes_float16:
            yield "training.precision: float16 is for lora on one GPU and for qlora; use bfloat16 or float32"

    def _batch_conflicts(self) -> Iterator[str]:
        """Yield numbers of sequences, tokens and processes that do not fit together."""
        data = self.data
        hardware = self.hardware
        batch_size = self.training.per_device_batch_size
        global_batch_size = self.training.global_batch_size
        if hardware.processes % hardware.context_parallel:
            yield (
                f"hardware.context_parallel: {hardware.context_parallel} does not divide {hardware.processes} processes"
            )
        elif global_batch_size % self.sequences_at_once:
            yield (
                f"training.global_batch_size: {global_batch_size} is not a multiple of {self.sequences_at_once} "
                f"(per_device_batch_size {batch_size} on {hardware.data_parallel} processes)"
            )
        if data.has_isolated and self.model.attention == "eager":
            yield "model.attention: eager cannot isolate texts in a sequence; leave it out or set data.packing: wrapped"
        if data.keep_short and batch_size > 1:
            yield "data.keep_short: short sequences differ in length; set training.per_device_batch_size: 1"
        target = self.context.target
        if data.sequence_tokens is not None and data.sequence_tokens > target:
            yield f"data.sequence_tokens: {data.sequence_tokens} is more than context.target, {target}; lower it"

    def _context_parallel_conflicts(self) -> Iterator[str]:
        """Yield keys that do not fit GPUs that share a sequence."""
        data = self.data
        if data.has_examples or data.positions == "pose" or data.keep_short:
            lengths = "examples differ in length, and positions: pose and keep_short have short sequences"
            yield f"hardware.context_parallel: {lengths}; set it to 1"
        elif data.has_isolated:
            yield "hardware.context_parallel: cannot isolate texts in a sequence; set data.packing: wrapped"
        if self.evaluation.every:
            yield "evaluation.every: cannot measure while GPUs share a sequence; measure the finished run"
        target = self.context.target
        divisor = 2 * self.hardware.context_parallel
        if target % divisor:
            yield f"context.target: {target} is not a multiple of {divisor}, twice hardware.context_parallel"
