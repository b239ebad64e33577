"""What a recipe may say: one schema, checked once; defaults stand here and nowhere else."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Dtype = Literal["float32", "bfloat16", "float16"]
Schedule = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
Tracker = Literal["tensorboard", "wandb", "trackio"]


class Section(BaseModel):
    """A part of a recipe: unknown keys and wrong types are errors, values are not changed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Model(Section):
    """The base model to stretch, or an extended one to tune further."""

    name: str = Field(min_length=1, description="hub id, folder of weights, run or adapter folder, or builtin:tiny")
    revision: str = Field("main", description="branch, tag or commit on the hub")
    dtype: Dtype | None = Field(None, description="of the loaded weights; by default what the method needs")
    trust_remote_code: bool = Field(False, description="run Python code that the model's repository brings")
    attention: Literal["auto", "sdpa", "flash_attention_2", "eager"] = Field(
        "auto", description="the kernel; auto: the one made for this GPU if it is installed, else torch's (sdpa)"
    )


class Context(Section):
    """The windows in tokens: `original` is L, `target` is L'."""

    target: int = Field(gt=0, description="how far the model is to read; with `scaling: keep` the longest example")
    original: int | None = Field(None, gt=0, description="read from the model's config unless given")

    @model_validator(mode="after")
    def _longer(self) -> Self:
        if self.original is not None and self.target <= self.original:
            raise ValueError(f"target {self.target} is not longer than original {self.original}; nothing to extend")
        return self


class Tuning(Section):
    """What trains, and how the adapter is shaped."""

    method: Literal["lora", "qlora", "full"] = Field(
        "lora", description="an adapter, an adapter on a base in four bits (NF4), or every weight"
    )
    rank: int = Field(16, gt=0, description="of the adapter's matrices")
    alpha: float | None = Field(None, gt=0, description="twice the rank unless given")
    rank_stabilized: bool = Field(False, description="scale by alpha / sqrt(rank) (Kalajdzievski 2023)")
    dora: bool = Field(False, description="train magnitudes and directions apart (Liu et al. 2024)")
    dropout: float = Field(0.0, ge=0, lt=1, description="of the adapter's inputs")
    targets: Literal["attention", "all-linear"] = Field("all-linear", description="the matrices that get an adapter")
    embeddings_and_norms: bool = Field(True, description="train them in full beside LoRA (LongLoRA's finding)")

    @property
    def lora_alpha(self) -> float:
        """Alpha as PEFT takes it: the update is scaled by alpha / rank."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class Source(Section):
    """One place that documents come from, and its share of the training tokens."""

    name: str = Field(min_length=1, description="hub id, file, folder, glob, builtin:stdlib or builtin:recall")
    weight: float = Field(1.0, gt=0, description="its share of the sequences, against the other sources'")
    column: str = Field("text", description="of a hub data set, .jsonl or .parquet: the one that holds the text")
    subset: str | None = Field(None, description="of a hub data set that has several (its `name`)")
    split: str = Field("train", description="of a hub data set")
    revision: str = Field("main", description="of a hub data set: branch, tag or commit")
    streaming: bool = Field(False, description="read a hub data set as it is needed, without downloading the whole")


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _as_sources(value: object) -> object:
    entries = value if isinstance(value, list) else [value]
    return tuple({"name": entry} if isinstance(entry, str) else entry for entry in entries)


class Data(Section):
    """What the model is tuned on: documents, packed into sequences of L' tokens, or examples of a task, one a row."""

    source: Annotated[tuple[Source, ...], BeforeValidator(_as_sources), Field(min_length=1)]
    packing: Literal["wrapped", "bfd_split"] = Field(
        "wrapped", description="cut one stream of documents, or fit whole ones together and split only what is too long"
    )
    positions: Literal["contiguous", "skip"] = Field(
        "contiguous", description="skip: L tokens whose positions skip ahead over L' (PoSE, Zhu et al. 2023)"
    )
    chunks: int = Field(2, ge=2, description="of consecutive positions in a sequence that skips")
    min_document_tokens: int = Field(1, gt=0, description="shorter documents are left out")
    document: str | None = Field(
        None, description="examples: the column that is cut to fit; with `summary`, what to read"
    )
    summary: str | None = Field(
        None, description="examples of summaries: the column that holds them; the paper's prompt"
    )
    template: str | None = Field(
        None, description="examples of any task: the prompt, with {column} where a column goes"
    )
    completion: str | None = Field(None, description="with `template`: the column that holds what is to be written")
    document_tokens: int = Field(15000, gt=0, description="`document` is cut to its first so many, or to what fits")
    completion_tokens: int = Field(1000, gt=0, description="the summary or completion is cut to its first so many")
    loss: Literal["completion", "all"] = Field(
        "completion", description="of examples: what is learned; prompts are not"
    )
    epochs: int = Field(1, gt=0, description="how many times the same text may be used")
    seed: int = Field(0, description="of the order of documents and the mixture")

    @property
    def has_examples(self) -> bool:
        """Whether each row is a prompt and its completion, rather than text to pack."""
        return self.template is not None or self.summary is not None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.summary is not None and (self.template is not None or self.completion is not None):
            raise ValueError("summary: has the paper's prompt; with a template of your own call the column completion")
        if self.summary is not None and self.document is None:
            raise ValueError("summary: needs document, the column that is to be summarized")
        if (self.template is None) != (self.completion is None):
            raise ValueError("template, completion: go together, the prompt and the column of what follows it")
        if self.document is not None and not self.has_examples:
            raise ValueError("document: goes with summary, or with template and completion; give them, or leave it out")
        if self.has_examples and self.positions == "skip":
            raise ValueError("positions: skip: is for packed text; examples need contiguous")
        if self.has_examples and any(source.weight != 1.0 for source in self.source):
            raise ValueError("source: weight is for packed text; every example is used as often")
        return self


class Training(Section):
    """The paper's schedule (section 3.1) unless a recipe says otherwise."""

    steps: int = Field(1000, gt=0, description="of the optimizer")
    learning_rate: float = Field(2e-5, gt=0, description="the highest of the schedule")
    global_batch_size: int = Field(64, gt=0, description="sequences a step, over all processes")
    per_device_batch_size: int = Field(1, gt=0, description="sequences a forward pass")
    schedule: Schedule = Field("constant", description="of the rate after the warm-up, by transformers' names")
    schedule_options: dict[str, float | int] = Field({}, description="as min_lr_rate or num_decay_steps")
    warmup_steps: int = Field(20, ge=0, description="over which the rate rises along a line")
    warmup_start: float = Field(0.1, ge=0, le=1, description="share of the maximum rate that step 0 begins with")
    optimizer: Literal["adamw", "paged_adamw_8bit"] = Field("adamw", description="the second needs a GPU")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    betas: Annotated[tuple[float, float], BeforeValidator(_as_tuple)] = Field((0.9, 0.95), description="of AdamW")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to it")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the arithmetic; auto: bfloat16 where the hardware has it"
    )
    activation_checkpointing: bool = Field(True, description="recompute layers going backward, to save memory")
    mlp_chunk_tokens: int | None = Field(
        None, gt=0, description="tokens that an MLP takes at a time, to save memory; all at once unless given"
    )
    save_every: int = Field(100, gt=0, description="steps between checkpoints; they go when the run is whole")
    log_every: int = Field(10, gt=0, description="steps between lines of training.jsonl")
    tracking: Annotated[tuple[Tracker, ...], BeforeValidator(_as_tuple)] = Field((), description="also log there")
    seed: int = Field(0, description="of the adapter's first values, dropout and the order of sequences")


class Hardware(Section):
    """What the run is spread over."""

    gpus: int | None = Field(None, gt=0, description="of each machine; by default one process on what there is")
    cpu_processes: int | None = Field(None, gt=0, description="of each machine, where there are no GPUs")
    machines: int = Field(1, gt=0, description="each is started with its --machine-rank")
    context_parallel: int = Field(1, gt=0, description="GPUs that share one sequence")
    offload_activations: bool = Field(False, description="keep checkpointed activations in host memory")

    @property
    def processes_per_machine(self) -> int:
        """One a GPU, or as many as the CPU is to carry."""
        return self.gpus or self.cpu_processes or 1

    @property
    def processes(self) -> int:
        """Over all machines."""
        return self.processes_per_machine * self.machines

    @property
    def data_parallel(self) -> int:
        """Sequences that are worked on at once."""
        return self.processes // self.context_parallel


class PerplexityEvaluation(Section):
    """Sliding-window perplexity (paper, section 3.2)."""

    data: str = Field("builtin:stdlib", description="a file, folder, glob or hub id with a column `text`")
    windows: Annotated[tuple[int, ...] | None, BeforeValidator(_as_tuple)] = Field(
        None, description="lengths in tokens; L' and its halves unless given"
    )
    stride: int | None = Field(None, gt=0, description="256, or half the shortest window")
    documents: int | None = Field(None, gt=0, description="only the first so many")


class PasskeyEvaluation(Section):
    """Passkey retrieval (paper, section 3.3)."""

    target: int | None = Field(None, gt=0, description="tokens of context; L' unless given")
    depths: int = Field(32, gt=0, description="distances, uniformly spaced to the target")
    trials: int = Field(10, gt=0, description="random keys at each")
    seed: int = Field(0, description="of the keys")


class BenchmarksEvaluation(Section):
    """Short-context benchmarks (paper, table 5), of the finished run alone."""

    tasks: Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Field(min_length=1)] = Field(
        ("boolq", "piqa", "race_middle", "race_high", "winogrande"),
        description="tasks or groups of lm-eval, at the original window",
    )
    window: int | None = Field(None, gt=1, description="tokens that an input is cut to; L unless given")
    limit: int | None = Field(None, gt=0, description="only the first so many examples of each")
    batch_size: int = Field(8, gt=0, description="inputs a forward pass")
    data: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = Field(
        (), description="files or folders instead of the hub, as `boolq=FILE`, or a folder of such"
    )


class Evaluation(Section):
    """What is measured of a run, and how often while it trains."""

    every: int | None = Field(None, gt=0, description="steps between measurements, step 0 among them")
    perplexity: PerplexityEvaluation | None = None
    passkey: PasskeyEvaluation | None = None
    benchmarks: BenchmarksEvaluation | None = None


class Recipe(Section):
    """Everything that determines a run."""

    model: Model
    context: Context
    scaling: Literal["pi", "direct", "dynamic", "yarn", "keep"] = Field(
        "pi",
        description="Position Interpolation; keep: the model's own, of one that is extended; the others to compare",
    )
    tuning: Tuning = Tuning()
    data: Data
    training: Training = Training()
    hardware: Hardware = Hardware()
    evaluation: Evaluation = Evaluation()
    paper: str | None = Field(None, description="the row of the paper's tables that this recipe repeats")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        training, hardware = self.training, self.hardware
        if self.tuning.method == "full" and self.model.dtype not in (None, "float32"):
            raise ValueError(
                f"model.dtype: {self.model.dtype} weights would round most updates of full tuning away; leave it out"
            )
        if hardware.offload_activations and not training.activation_checkpointing:
            raise ValueError("hardware.offload_activations: needs training.activation_checkpointing: true")
        if training.mlp_chunk_tokens and self.tuning.dropout:
            raise ValueError("training.mlp_chunk_tokens: cannot repeat what tuning.dropout dropped; leave one out")
        if hardware.gpus and hardware.cpu_processes:
            raise ValueError("hardware: gpus and cpu_processes exclude each other; keep one")
        if hardware.processes % hardware.context_parallel:
            raise ValueError(
                f"hardware.context_parallel: {hardware.context_parallel} does not divide {hardware.processes} processes"
            )
        at_once = training.per_device_batch_size * hardware.data_parallel
        if training.global_batch_size % at_once:
            raise ValueError(
                f"training.global_batch_size: {training.global_batch_size} is not a multiple of {at_once} "
                f"(per_device_batch_size {training.per_device_batch_size} on {hardware.data_parallel} processes)"
            )
        if hardware.context_parallel > 1 and self.data.has_examples:
            raise ValueError("hardware.context_parallel: examples have lengths of their own; set it to 1")
        if self.scaling == "keep" and self.context.original is not None:
            raise ValueError("context.original: with scaling: keep the model's windows are its own; leave it out")
        if self.scaling == "keep" and self.data.positions == "skip":
            raise ValueError("data.positions: skip: is for extending a model; not with scaling: keep")
        if hardware.context_parallel > 1 and self.data.positions == "skip":
            raise ValueError("data.positions: skip: its sequences are short; set hardware.context_parallel to 1")
        if hardware.context_parallel > 1 and self.context.target % (2 * hardware.context_parallel):
            raise ValueError(
                f"context.target: {self.context.target} is not a multiple of {2 * hardware.context_parallel}, "
                "twice hardware.context_parallel"
            )
        return self
