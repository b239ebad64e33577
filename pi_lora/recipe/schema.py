"""What a recipe may say: one schema, checked once; defaults stand here and nowhere else."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Dtype = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """A part of a recipe: unknown keys and wrong types are errors, values are not changed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Model(Section):
    """The base model to stretch."""

    name: str = Field(min_length=1, description="hub id, folder, or builtin:tiny")
    revision: str = Field("main", description="branch, tag or commit on the hub")
    dtype: Dtype | None = Field(None, description="of the loaded weights; by default what the method needs")
    trust_remote_code: bool = Field(False, description="run Python code that the model's repository brings")


class Context(Section):
    """The windows in tokens: `original` is L, `target` is L'."""

    target: int = Field(gt=0)
    original: int | None = Field(None, gt=0, description="read from the model's config unless given")

    @model_validator(mode="after")
    def _longer(self) -> Self:
        if self.original is not None and self.target <= self.original:
            raise ValueError(f"target {self.target} is not longer than original {self.original}; nothing to extend")
        return self


class Tuning(Section):
    """What trains, and how the adapter is shaped."""

    method: Literal["lora", "full"] = "lora"
    rank: int = Field(16, gt=0)
    alpha: float | None = Field(None, gt=0, description="twice the rank unless given")
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: Literal["attention", "all-linear"] = "all-linear"
    embeddings_and_norms: bool = Field(True, description="train them in full beside LoRA (LongLoRA's finding)")

    @property
    def lora_alpha(self) -> float:
        """Alpha as PEFT takes it: the update is scaled by alpha / rank."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class Source(Section):
    """One place that documents come from, and its share of the training tokens."""

    name: str = Field(min_length=1, description="builtin:stdlib, builtin:recall, a text file or a folder of them")
    weight: float = Field(1.0, gt=0)


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _as_sources(value: object) -> object:
    entries = value if isinstance(value, list) else [value]
    return tuple({"name": entry} if isinstance(entry, str) else entry for entry in entries)


class Data(Section):
    """What the model is tuned on: a stream of documents, cut into sequences of exactly L' tokens (`wrapped`)."""

    source: Annotated[tuple[Source, ...], BeforeValidator(_as_sources), Field(min_length=1)]
    seed: int = 0


class Training(Section):
    """The paper's schedule (section 3.1) unless a recipe says otherwise."""

    steps: int = Field(1000, gt=0)
    learning_rate: float = Field(2e-5, gt=0)
    global_batch_size: int = Field(64, gt=0, description="sequences a step, over all processes")
    per_device_batch_size: int = Field(1, gt=0, description="sequences a forward pass")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(20, ge=0)
    warmup_start: float = Field(0.1, ge=0, le=1, description="share of the maximum rate that step 0 begins with")
    weight_decay: float = Field(0.0, ge=0)
    betas: Annotated[tuple[float, float], BeforeValidator(_as_tuple)] = (0.9, 0.95)
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the arithmetic; auto: bfloat16 where the hardware has it"
    )
    activation_checkpointing: bool = True
    save_every: int | None = Field(None, gt=0, description="steps between checkpoints")
    log_every: int = Field(10, gt=0, description="steps between lines of training.jsonl")
    seed: int = 0

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.global_batch_size % self.per_device_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"per_device_batch_size {self.per_device_batch_size}"
            )
        return self


class Recipe(Section):
    """Everything that determines a run."""

    model: Model
    context: Context
    scaling: Literal["pi", "direct"] = "pi"
    tuning: Tuning = Tuning()
    data: Data
    training: Training = Training()
