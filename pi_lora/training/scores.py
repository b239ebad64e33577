"""What a recipe's `evaluation` measures while it trains, as in tables 3 and 4 of the paper: step 0, 200, 400 ..."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from pi_lora.distributed import is_leader
from pi_lora.evaluation.results import write_scores
from pi_lora.evaluation.suite import measure
from pi_lora.models.attention import SDPA
from pi_lora.models.load import LoadedModel
from pi_lora.recipe.schema import Evaluation
from pi_lora.run_folder import SCORES
from pi_lora.training.log import TrainingLog


class TrainingScores(TrainerCallback):
    """Measures the model at step 0, every `evaluation.every` steps and the last, into `scores/NAME-step-N.json`. All
    processes measure the same, since a sharded model needs them all; the leader writes.
    """

    def __init__(self, evaluation: Evaluation, loaded: LoadedModel, folder: Path, log: TrainingLog) -> None:
        self.evaluation, self.loaded, self.folder, self.log = evaluation, loaded, folder / SCORES, log

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Step 0: interpolated, not tuned."""
        if state.global_step == 0:
            self._measure(0)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Measure if it is time to."""
        every = self.evaluation.every
        if every and (state.global_step % every == 0 or state.global_step == state.max_steps):
            self._measure(state.global_step)

    def _measure(self, step: int) -> None:
        started = time.monotonic()
        with _as_when_loaded(self.loaded.model):
            measured = measure(self.loaded, self.evaluation)
        if is_leader():
            for name, scores in measured.items():
                write_scores(scores.model_copy(update={"step": step}), self.folder / f"{name}-step-{step}.json")
        self.log.not_training(time.monotonic() - started)


@contextmanager
def _as_when_loaded(model: Any) -> Iterator[None]:
    """Let a model that trains compute as it will when `load` reads it back: with SDPA, in the dtype of its weights.
    accelerate 1.15 puts autocast around the forward of the model that it prepares, and keeps the model's own beside it
    as `_original_forward`. Under FSDP2 there is none: the sharded layers compute as their policy says.
    """
    training, attention, wrapped = model.training, model.config._attn_implementation, vars(model).get("forward")
    own = vars(model).get("_original_forward")
    model.eval()
    model.set_attn_implementation(SDPA)
    if own is not None:
        model.forward = own
    try:
        yield
    finally:
        if own is not None:
            model.forward = wrapped
        model.set_attn_implementation(attention)
        model.train(training)
