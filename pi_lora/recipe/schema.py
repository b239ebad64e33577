"""The schema of a recipe, checked once, and the only home of each default."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pi_lora.recipe.evaluation import Evaluation
from pi_lora.recipe.section import LIST, Section, Seed, Texts, Tokens

Dtype = Literal["float32", "bfloat16", "float16"]
# fmt: off
Schedule = Literal["constant", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "polynomial",
                   "inverse_sqrt", "warmup_stable_decay"]
# fmt: on
Method = Literal["lora", "qlora", "full"]
Scaling = Literal["pi", "yarn", "theta", "llama3", "dynamic", "direct", "keep"]


# What TRL and ShareGPT call the column of chats.
CHAT_COLUMNS = ("messages", "conversations")


def _as_sources(value: object) -> object:
    entries = value if isinstance(value, list | tuple) else [value]
    return tuple({"name": entry} if isinstance(entry, str) else entry for entry in entries)


class Model(Section):
    """The base model to stretch, or an extended one to tune further."""

    name: str = Field(min_length=1)
    """hub id, folder of weights, run or adapter, or builtin:tiny"""
    revision: str = "main"
    """branch, tag or commit on the hub"""
    dtype: Dtype | None = None
    """of the loaded weights; by default what the tuning method needs"""
    attention: Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "eager"] = "auto"
    """auto: torch's (sdpa)"""
    kernels: Literal["transformers", "liger"] = "transformers"
    """of the other parts of layers"""


class Context(Section):
    """The windows in tokens: `original` is L, `target` is L'."""

    target: Tokens
    """16384, or 16k: the window after tuning; with `scaling: keep` the longest example"""
    original: Tokens | None = None
    """the model's own window; by default read from its config"""
    theta: float | None = Field(None, gt=1)
    """of `scaling: theta`: the new rope_theta; by default NTK-aware"""

    def conflicts(self) -> Iterator[str]:
        """Yield that there is nothing to extend."""
        if self.target <= (self.original or 0):
            yield f"target {self.target} is not longer than original {self.original}; nothing to extend"


class Tuning(Section):
    """Which weights train, and the shape of the adapter."""

    method: Method = "lora"
    """an adapter, an adapter on a 4-bit (NF4) base, or all weights"""
    rank: PositiveInt = 16
    """of the adapter's matrices"""
    alpha: PositiveFloat | None = None
    """by default twice the rank"""
    rank_stabilized: bool = False
    """scale by alpha / sqrt(rank) (Kalajdzievski 2023)"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """probability, on the adapter's inputs"""
    target_modules: Literal["attention", "all-linear"] | Texts = "all-linear"
    """linear layers that get an adapter; or the names of modules, as [q_proj, v_proj]"""
    modules_to_save: Literal["embeddings_and_norms", "norms", "nothing"] = "embeddings_and_norms"
    """in full, with the adapter (LongLoRA)"""

    @property
    def target_names(self) -> set[str]:
        """`attention`, `all-linear`, or names of modules."""
        if isinstance(self.target_modules, str):
            return {self.target_modules}
        return set(self.target_modules)

    @property
    def lora_alpha(self) -> float:
        """Alpha in PEFT's sense: the update is scaled by alpha / rank."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def with_embeddings(self) -> bool:
        """Whether embeddings train in full beside the adapter."""
        return self.modules_to_save == "embeddings_and_norms"

    @property
    def with_norms(self) -> bool:
        """Whether norms train in full beside the adapter."""
        return self.modules_to_save != "nothing"


class Source(Section):
    """A source of documents, and its share of the training tokens; or a list of them."""

    name: str = Field(min_length=1)
    """hub id, file, folder, glob, builtin:stdlib or builtin:recall"""
    weight: PositiveFloat = 1.0
    """its share of the sequences, relative to the other sources"""
    column: str = "text"
    """of a hub data set, .jsonl, .parquet or .csv: the column of text; `messages` or `conversations`: of chats"""
    subset: str | None = None
    """of a hub data set that has several (`datasets` calls it `name`)"""
    split: str = "train"
    """of a hub data set"""
    revision: str = "main"
    """of a hub data set: branch, tag or commit"""
    streaming: bool = False
    """read a hub data set as it is needed, without downloading all of it"""
    hold_out: float | None = Field(None, gt=0, lt=1)
    """share of its documents, or of its one text, that does not train: text for `evaluation.perplexity`"""

    @property
    def has_chats(self) -> bool:
        """Whether its rows are chats."""
        return self.column in CHAT_COLUMNS


class Data(Section):
    """The training data: documents packed into sequences of L' tokens, or examples of a task, one per row."""

    source: Annotated[tuple[Source, ...], BeforeValidator(_as_sources), Field(min_length=1)]
    packing: Literal["wrapped"] = "wrapped"
    """documents are one stream, which is cut"""
    positions: Literal["contiguous", "pose"] = "contiguous"
    """pose: PoSE, few tokens spread over L'"""
    sequence_tokens: Tokens | None = Field(None, gt=1)
    """PoSE: tokens of a sequence, at most L'; by default L, of `scaling: keep` none"""
    chunks: int = Field(2, ge=2)
    """PoSE (Zhu et al. 2023): runs of consecutive positions in a sequence"""
    min_document_tokens: PositiveInt = 1
    """shorter documents are left out"""
    document: str | None = None
    """examples: the column to summarize, or that is cut to fit"""
    summary: str | None = None
    """examples under the paper's prompt: the column of summaries"""
    template: str | None = None
    """examples of any task: a prompt with {column} for a column"""
    completion: str | None = None
    """with `template`: the column that holds the answer"""
    document_tokens: PositiveInt = 15000
    """a longer `document` is cut, or to what fits"""
    completion_tokens: PositiveInt = 1000
    """the longest summary or completion; a longer one is cut"""
    loss: Literal["completion", "all"] = "completion"
    """which tokens of examples and chats count: completions and the assistant's turns; `all`: prompts too"""
    keep_short: float = Field(0.0, ge=0, lt=1)
    """share of the sequences that are short chats at their own lengths, against forgetting"""
    epochs: PositiveInt = 1
    """how often the same text may be used"""
    special_tokens: bool = False
    """read `</s>` and its like in texts as special tokens, not as text"""
    seed: Seed = 0
    """of the order of documents, the mixture and PoSE"""

    @property
    def has_examples(self) -> bool:
        """Whether rows are prompts with completions, rather than text to pack."""
        return self.template is not None or self.summary is not None

    @property
    def has_chats(self) -> bool:
        """Whether some of what is packed are chats."""
        return not self.has_examples and any(source.has_chats for source in self.source)

    def tokens_per_sequence(self, original: int, target: int) -> int:
        """Return the tokens of a packed sequence: `target` (L'), under PoSE `sequence_tokens` or `original` (L)."""
        return target if self.positions == "contiguous" else self.sequence_tokens or original

    def conflicts(self) -> Iterator[str]:
        """Yield keys of packed text with those of examples, and of text with those of chats."""
        if self.sequence_tokens is not None and self.positions != "pose":
            yield "sequence_tokens: is the length of PoSE sequences; set positions: pose, or leave it out"
        columns = {"document", "summary", "template", "completion"}
        given = self.model_dump(include=columns, exclude_none=True).keys()
        own = {"template", "completion"}
        if given and given not in ({"document", "summary"}, own, own | {"document"}):
            kinds = "document and summary, or template and completion, with a document if one may be cut"
            yield f"{', '.join(given)}: examples have {kinds}; give one of the two"
        if self.has_examples and self.positions == "pose":
            yield "positions: pose: is for packed text; examples need contiguous"
        if any(source.hold_out and (self.has_examples or source.has_chats) for source in self.source):
            yield "source: hold_out is for text; hold examples and chats out in a file of their own"
        if self.keep_short and not self.has_chats:
            yield "keep_short: takes its sequences from chats; add a source with column: messages"
        if self.has_examples and any(source.weight != 1.0 for source in self.source):
            yield "source: weight is for packed text; all examples are used equally often"


class Training(Section):
    """Steps, optimizer and schedule; the defaults are the paper's (section 3.1)."""

    steps: PositiveInt = 1000
    """optimizer steps"""
    learning_rate: PositiveFloat = 2e-5
    """the maximum of the schedule"""
    global_batch_size: PositiveInt = 64
    """sequences per step, over all processes"""
    per_device_batch_size: PositiveInt = 1
    """sequences per forward pass"""
    schedule: Schedule = "constant"
    """of the learning rate after the warm-up, by transformers' names"""
    schedule_options: dict[str, float | int] = Field({})
    """for example min_lr_rate or num_decay_steps"""
    warmup_steps: NonNegativeInt = 20
    """steps over which the rate rises linearly"""
    warmup_start: float = Field(0.1, ge=0, le=1)
    """the rate at step 0, as a share of the maximum"""
    optimizer: Literal["adamw", "paged_adamw_8bit"] = "adamw"
    """paged_adamw_8bit needs a GPU"""
    weight_decay: NonNegativeFloat = 0.0
    """of AdamW"""
    betas: Annotated[tuple[float, float], LIST] = (0.9, 0.95)
    """of AdamW"""
    max_grad_norm: PositiveFloat = 1.0
    """gradients are clipped to this norm"""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 where it is faster; float16 for adapters on a GPU without it"""
    activation_checkpointing: bool | Literal["selective"] | Annotated[int, Field(ge=2)] = True
    """recompute layers in the backward pass, to save memory: n every n-th layer only, selective all but attention"""
    mlp_chunk_tokens: PositiveInt | None = None
    """tokens per piece of an MLP's input; by default all"""
    save_every: PositiveInt = 100
    """steps between checkpoints; a complete run keeps none"""
    log_every: PositiveInt = 10
    """steps between lines of training.jsonl"""
    tracking: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], LIST] = ()
    """also log to these"""
    seed: Seed = 0
    """of the adapter's initial values, dropout and the order of sequences"""

    def checkpointed_layers(self, layers: int) -> int:
        """Return how many of `layers` are computed again in the backward pass: of every n-th the first one, as well."""
        every = self.activation_checkpointing
        return layers if every == "selective" else -(-layers // every) if every else 0


class Hardware(Section):
    """The GPUs, processes and machines of a run."""

    gpus: PositiveInt | None = None
    """per machine; by default one process on what there is"""
    gpu: Annotated[str | None, BeforeValidator(lambda name: name if name is None else str(name))] = None
    """what it is planned for, as H100 or 48GB; by default this machine's"""
    cpu_processes: PositiveInt | None = None
    """per machine, if gpus is left out"""
    machines: PositiveInt = 1
    """each is started with its own --machine-rank"""
    context_parallel: PositiveInt = 1
    """GPUs that share one sequence"""
    offload_activations: bool = False
    """keep checkpointed activations in host memory"""

    @property
    def processes_per_machine(self) -> int:
        """One per GPU, or as many as asked for on CPUs."""
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
    """of the rotary frequencies; keep: that of an extended model"""
    tuning: Tuning = Tuning()
    data: Data
    training: Training = Training()
    hardware: Hardware = Hardware()
    evaluation: Evaluation = Evaluation()
    paper: str | None = None
    """the row of the paper's tables that this recipe reproduces"""

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 shards the model over the GPUs, layer by layer; each holds the whole of a quantized one."""
        return self.hardware.gpus is not None and self.tuning.method != "qlora"

    @property
    def sequences_at_once(self) -> int:
        """Sequences of one forward pass, over all processes."""
        return self.training.per_device_batch_size * self.hardware.data_parallel

    @property
    def _takes_float16(self) -> bool:
        """Whether its gradients can be scaled, as float16 needs: accelerate 1.15 does not for sharded weights."""
        return self.tuning.method != "full" and not (self.sharded and self.hardware.processes > 1)

    def computes_in(self, on_cpu: bool, has_bfloat16: bool) -> str:
        """Return the dtype in which a training step computes; weights that train are float32 all the same."""
        if self.training.precision != "auto":
            return self.training.precision
        if has_bfloat16:
            return "bfloat16"
        return "float32" if on_cpu or not self._takes_float16 else "float16"

    def dtype_of_base(self, on_cpu: bool, has_bfloat16: bool) -> str:
        """Return the dtype of the base: float32 master weights where every weight trains, else bfloat16 under a float32
        adapter; float16 or float32, as it computes, on a GPU that has no bfloat16. On a CPU a LoRA base is float32 as
        well, which is faster where bfloat16 is not.
        """
        method, in_float16 = self.tuning.method, self.computes_in(on_cpu, has_bfloat16) == "float16"
        in_float32 = method == "full" or (method == "lora" if on_cpu else not (has_bfloat16 or in_float16))
        return self.model.dtype or ("float32" if in_float32 else "float16" if in_float16 else "bfloat16")

    def conflicts(self) -> Iterator[str]:
        """Yield keys of different sections that do not fit together."""
        data, training, hardware = self.data, self.training, self.hardware
        target, at_once, parallel = self.context.target, training.per_device_batch_size, hardware.context_parallel
        if self.tuning.method == "full" and self.model.dtype not in (None, "float32"):
            yield f"model.dtype: {self.model.dtype} weights would round most updates of full tuning away; leave it out"
        if hardware.offload_activations and training.activation_checkpointing is not True:
            yield "hardware.offload_activations: needs training.activation_checkpointing: true"
        if training.mlp_chunk_tokens and self.tuning.dropout:
            yield "training.mlp_chunk_tokens: cannot repeat dropout; leave it or tuning.dropout out"
        if training.precision == "float16" and not self._takes_float16:
            yield "training.precision: float16 is for lora on one GPU and for qlora; use bfloat16 or float32"
        if hardware.processes % parallel:
            yield f"hardware.context_parallel: {parallel} does not divide {hardware.processes} processes"
        if training.global_batch_size % self.sequences_at_once:
            multiple = (
                f"{self.sequences_at_once} (per_device_batch_size {at_once} on {hardware.data_parallel} processes)"
            )
            yield f"training.global_batch_size: {training.global_batch_size} is not a multiple of {multiple}"
        if data.keep_short and at_once > 1:
            yield "data.keep_short: its sequences have other lengths; set training.per_device_batch_size: 1"
        if (data.sequence_tokens or 0) > target:
            yield f"data.sequence_tokens: {data.sequence_tokens} is more than context.target, {target}; lower it"
        if parallel > 1 and (data.has_examples or data.positions == "pose" or data.keep_short):
            what = "examples differ in length, and positions: pose and keep_short have short sequences"
            yield f"hardware.context_parallel: {what}; set it to 1"
        if parallel > 1 and self.evaluation.every:
            yield "evaluation.every: cannot measure while GPUs share a sequence; measure the finished run"
        if parallel > 1 and target % (2 * parallel):
            yield f"context.target: {target} is not a multiple of {2 * parallel}, twice hardware.context_parallel"
        if self.context.theta is not None and self.scaling != "theta":
            yield f"context.theta: has no effect under scaling: {self.scaling}; use theta, or leave it out"
        measured = self.evaluation.perplexity
        if measured and any(each.name == measured.data and each.hold_out != measured.hold_out for each in data.source):
            yield "evaluation.perplexity.hold_out: data.source has another of the same text; make them equal"
        if self.scaling == "keep" and data.positions == "pose" and data.sequence_tokens is None:
            yield "data.positions: pose: with scaling: keep name the tokens of a sequence, sequence_tokens"
