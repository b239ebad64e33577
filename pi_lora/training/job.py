"""A checked recipe with all that a training needs, made once by `preflight.check`; and its learning rate schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import get_scheduler

from pi_lora.data.batches import TrainingData, training_data
from pi_lora.errors import RecipeError
from pi_lora.models.machine import computes_in_bfloat16
from pi_lora.models.model import Model
from pi_lora.recipe.schema import Recipe, Training
from pi_lora.scaling.config import read_rope
from pi_lora.types import NO_PERMISSIONS, Permissions, Progress, silent


@dataclass
class Job:
    """A recipe, its output, the model that is tuned, its original window L in tokens, whether an interrupted run
    continues, and what the user permits.
    """

    recipe: Recipe
    output: Path
    model: Model
    original: int
    resume: bool = False
    permissions: Permissions = NO_PERMISSIONS
    data: TrainingData | None = None

    @property
    def needs_its_config(self) -> bool:
        """Whether an adapter on the base would be unscaled if the base were loaded under its own config."""
        return self.recipe.tuning.method != "full" and read_rope(self.model.config) != read_rope(self.model.base_config)

    @cached_property
    def attention(self) -> str:
        """The attention kernel by transformers' name."""
        asked, together = self.recipe.model.attention, self.recipe.hardware.context_parallel
        return self.model.attention(asked, computes_in_bfloat16(self.recipe), together)

    @property
    def sequences_at_once(self) -> int:
        """Sequences of one forward pass, over all processes."""
        return self.recipe.training.per_device_batch_size * self.recipe.hardware.data_parallel

    def prepare(self, progress: Progress = silent, processes: int = 1) -> TrainingData:
        """Return the packed sequences or the examples of the recipe; made once in `processes`, then read from the
        cache.
        """
        if self.data is None:
            recipe, lengths = self.recipe, (self.original, self.recipe.context.target)
            sections = recipe.data, recipe.training
            self.data = training_data(*sections, self.model.tokenizer, *lengths, progress, processes)
        return self.data


def rate_share(training: Training) -> Callable[[int], float]:
    """Return the share of the maximum rate at each step: linear warm-up from `warmup_start` (paper.tex, section 3.1),
    then one of transformers' schedules.

    >>> rate = rate_share(Training(steps=100, schedule="constant", warmup_steps=20, warmup_start=0.1))
    >>> [round(rate(step), 3) for step in (0, 10, 20, 99)]
    [0.1, 0.55, 1.0, 1.0]
    """
    # transformers needs an optimizer for a schedule; only its maximum rate is read.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate)
    name = "constant_with_warmup" if training.schedule == "constant" else training.schedule
    try:
        scheduler = get_scheduler(
            name, optimizer, training.warmup_steps, training.steps, dict(training.schedule_options)
        )
    except (TypeError, ValueError) as error:
        problem = f"{training.schedule} does not accept them ({error})"
        raise RecipeError([f"training.schedule_options: {problem}; correct them"]) from None
    after_warmup: Callable[[int], float] = scheduler.lr_lambdas[0]

    def share(step: int) -> float:
        if step < training.warmup_steps:
            return training.warmup_start + (1 - training.warmup_start) * step / training.warmup_steps
        return float(after_warmup(step))

    return share
