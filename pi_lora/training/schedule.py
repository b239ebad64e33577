"""The learning rate of each step."""

from collections.abc import Callable

import torch
from transformers import get_scheduler

from pi_lora.errors import RecipeError
from pi_lora.recipe.schema import Training


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
