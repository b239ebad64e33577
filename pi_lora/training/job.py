"""A checked recipe with all that a training needs, made once by `preflight.check` and handed on."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pi_lora.data.batches import TrainingData, training_data
from pi_lora.models.attention import attention_kernel
from pi_lora.models.base import BaseModel, device, dtype_named, has_fast_bfloat16, load_tokenizer
from pi_lora.recipe.schema import Recipe
from pi_lora.scaling.config import Config
from pi_lora.types import Progress, silent


@dataclass
class Job:
    """A recipe, its base, the config that it is tuned under, its windows L and L' in tokens, its output, the folder of
    an adapter that is tuned further, and whether an interrupted run continues.
    """

    recipe: Recipe
    output: Path
    base: BaseModel
    config: Config
    original: int
    target: int
    adapter: Path | None = None
    resume: bool = False
    data: TrainingData | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the base, for inputs of L' tokens."""
        return load_tokenizer(self.base.path, self.target)

    @cached_property
    def in_bfloat16(self) -> bool:
        """Whether a step computes in bfloat16 here; weights that train are float32 all the same."""
        precision = self.recipe.training.precision
        return precision == "bfloat16" or (precision == "auto" and has_fast_bfloat16())

    @cached_property
    def attention(self) -> str:
        """The attention kernel by transformers' name."""
        return attention_kernel(self.recipe.model.attention, self.in_bfloat16, self.recipe.hardware.context_parallel)

    @property
    def dtype(self) -> torch.dtype:
        """The base's dtype: float32 master weights where every weight trains, else bfloat16 under a float32 adapter. On
        a CPU a LoRA base is float32 as well, which is faster without bfloat16 instructions.
        """
        method = self.recipe.tuning.method
        in_float32 = method == "full" or (method == "lora" and device().type == "cpu")
        return dtype_named(self.recipe.model.dtype or ("float32" if in_float32 else "bfloat16"))

    @property
    def sequences_at_once(self) -> int:
        """Sequences of one forward pass, over all processes."""
        return self.recipe.training.per_device_batch_size * self.recipe.hardware.data_parallel

    def prepare(self, progress: Progress = silent) -> TrainingData:
        """Return the packed sequences or the examples of the recipe; made once, then read from the cache."""
        if self.data is None:
            recipe, target = self.recipe, self.recipe.context.target
            self.data = training_data(recipe.data, recipe.training, self.tokenizer, self.original, target, progress)
        return self.data
