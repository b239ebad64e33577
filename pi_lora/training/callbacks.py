"""Callbacks of a training, one for each concern: the log, signals, divergence, checkpoints, and measurements."""

import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from pi_lora.distributed import (
    all_gather_objects,
    any_process,
    handle_signals,
    is_main_process,
    wait_for_all_processes,
    world_size,
)
from pi_lora.errors import Diverged, Interrupted
from pi_lora.evaluation.suite import chat_of, marked, measure, requested_measurements, write_scores
from pi_lora.models.adapter import mark_adapter_extended
from pi_lora.models.attention import use_blockwise
from pi_lora.models.files import ADAPTER_CONFIG_FILE
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.quiet import quiet_loading
from pi_lora.models.weights import finite
from pi_lora.recipe.evaluation import Evaluation
from pi_lora.run import TRAINING_LOG, Run
from pi_lora.types import Json, Progress, ui

LIBRARY_LOG = "libraries.log"


@dataclass
class StopOnSignal(TrainerCallback):
    """End the training after the step in which any process received a signal, with a checkpoint."""

    signals: Sequence[int]
    stopped: bool = False

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop after a checkpoint. A signal in the last step is too late: the finished run is saved next."""
        # All processes act on this answer; a signal that comes later counts from the next step on.
        received = any_process(bool(self.signals))
        if received and state.global_step < state.max_steps:
            self.stopped = True
            control.should_save = True
            control.should_training_stop = True


@dataclass
class CheckpointMarker(TrainerCallback):
    """Mark a checkpoint as complete when every process has written its part, and an adapter of an extended base as one
    that other tools must not load without the scaling. Shards are no adapter.
    """

    run: Run
    marks_adapter: bool

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save and log as often as the recipe says: transformers (5.23) takes the intervals from the checkpoint."""
        state.compute_steps(args, state.max_steps)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Mark the newest checkpoint."""
        wait_for_all_processes()
        if is_main_process():
            checkpoint = self.run.checkpoints[0]
            if self.marks_adapter and (checkpoint / ADAPTER_CONFIG_FILE).is_file():
                mark_adapter_extended(checkpoint)
            self.run.mark_complete(checkpoint)
        wait_for_all_processes()


@dataclass
class ScheduledMeasurements(TrainerCallback):
    """Measure the model at step 0, every `evaluation.every` steps and the last (tables 3 and 4 of the paper), into
    `scores/NAME-step-N.json`, after a checkpoint was written. Each process measures its part; the first one writes.
    """

    evaluation: Evaluation
    model: LoadedModel
    run: Run
    stop: StopOnSignal

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Measure step 0, extended but not tuned, or the step of a checkpoint whose measuring was interrupted."""
        if not self._is_due(state):
            return
        stage = f"step {state.global_step}"
        names = requested_measurements(self.evaluation.in_short())
        is_missing = not all(self.run.scores_file(name, stage).is_file() for name in names)
        if any_process(is_main_process() and is_missing):
            self.measure_at(state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Ask for the checkpoint that precedes a measurement."""
        if self._is_due(state):
            control.should_save = True

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Measure after the checkpoint, unless a signal ends the training."""
        if self._is_due(state) and not self.stop.stopped:
            self.measure_at(state.global_step)

    def measure_at(self, step: int) -> None:
        """Measure a step; raise Interrupted after a signal."""

        def stop_if_signalled(done: int, total: int, note: str = "") -> None:
            # Several processes measure different parts and meet at the end.
            if self.stop.signals and world_size() == 1:
                raise Interrupted(f"{self.model.name}: interrupted while step {step} was measured; {self._remedy()}")

        # As the step before, also after a resumption.
        chat, *_ = all_gather_objects([chat_of(self.run)])
        say = ui.say if step == 0 else str
        with _as_when_loaded(self.model):
            scores = measure(self.model, self.evaluation, stop_if_signalled, say, chat=chat)
        if is_main_process():
            for name, result in scores.items():
                of_step = result.model_copy(update={"step": step})
                if step > 0:
                    of_step = marked(of_step, self.run.texts)
                write_scores([of_step], self.run.scores_file(name, f"step {step}"))

    def _remedy(self) -> str:
        """Return how to go on after an interruption, which depends on what is kept of the run."""
        if self.run.path == Path(self.model.name):
            return f"the run is finished; measure it with pi-lora eval all {shlex.quote(self.model.name)}"
        if self.run.last_checkpoint:
            return "continue with --resume"
        return "no step was done, and nothing is kept; start it again"

    def _is_due(self, state: TrainerState) -> bool:
        """Whether the step is measured during training; the last step is measured when the run is saved."""
        every = self.evaluation.every
        return every is not None and state.global_step % every == 0 and state.global_step < state.max_steps


@dataclass
class StopOnDivergence(TrainerCallback):
    """End the training when the loss, or weights that are about to be saved, become infinite or NaN."""

    run: Run
    losses_are_finite: torch.Tensor | bool = True

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record whether a loss is finite, without waiting for the device."""
        self.losses_are_finite = torch.isfinite(loss).all() & self.losses_are_finite

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any) -> None:
        """Raise Diverged in all processes if any has numbers that are not finite."""
        diverged = ""
        if any_process(not self.losses_are_finite):
            diverged = "loss"
        # The loss of a step says nothing of the weights after it.
        is_saved = control.should_save or state.global_step == state.max_steps
        if is_saved and not diverged and any_process(not _trained_weights_are_finite(model)):
            diverged = "weights"
        if diverged:
            checkpoint = self.run.last_checkpoint
            kept = f" (the last good checkpoint is kept: {checkpoint})" if checkpoint else ""
            raise Diverged(
                f"training.learning_rate: the {diverged} of step {state.global_step} became infinite or NaN at a rate "
                f"of {args.learning_rate:g}; lower it and start again{kept}"
            )


@dataclass
class TrainingLog(TrainerCallback):
    """Write training.jsonl, and report the progress. The seconds are those of steps, without checkpoints and
    measurements. With the last line the weights are saved, before another write fails.
    """

    run: Run
    progress: Progress
    save: Callable[[list[Json]], object]
    note: str = ""
    seconds: float = 0.0
    step_started: float = 0.0
    logged_seconds: float = 0.0
    logged_tokens: int = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Continue from the numbers of the checkpoint, with which the log ends."""
        log = self.run.log
        self.seconds = log[-1]["seconds"] if log else 0.0
        self.logged_seconds = self.seconds
        self.logged_tokens = state.num_input_tokens_seen

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.step_started = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop the clock, and report the step; log the last step, and every step before a checkpoint."""
        self.seconds += time.perf_counter() - self.step_started
        self.progress(state.global_step, state.max_steps, self.note)
        if state.global_step == state.max_steps:
            # The finished run is saved next; it needs no checkpoint.
            control.should_log = True
            control.should_save = False
        elif control.should_save:
            # Seconds after the last line would be lost on resume.
            control.should_log = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: Any) -> None:
        """Append a line: loss in nats per token, rate, tokens so far, tokens a second, peak memory in bytes."""
        if "loss" not in logs:
            return
        tokens = state.num_input_tokens_seen
        memory = peak_memory()
        speed = (tokens - self.logged_tokens) / (self.seconds - self.logged_seconds)
        self.logged_seconds = self.seconds
        self.logged_tokens = tokens
        line = {
            "step": state.global_step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "gradient_norm": logs["grad_norm"],
            "tokens": tokens,
            "tokens_per_second": round(speed, 1),
            "peak_memory": memory,
            "seconds": round(self.seconds, 2),
        }
        if state.global_step == state.max_steps:
            self.save([*self.run.log, line])
        elif is_main_process():
            with (self.run.path / TRAINING_LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.note = f"loss {logs['loss']:.3f} {speed:,.0f} tokens/s {memory / 2**30:.1f} GiB"


def _trained_weights_are_finite(model: Any) -> bool:
    """Whether the weights that train are finite, of a sharded model those of this process."""
    trained = [weight.detach() for weight in model.parameters() if weight.requires_grad]
    return all(finite(values.to_local() if isinstance(values, DTensor) else values) for values in trained)


def peak_memory() -> int:
    """Return the peak memory of this process in bytes: of the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource  # which Windows does not have

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def stop_after_step() -> Iterator[list[int]]:
    """Let the current step end after SIGINT, SIGTERM or SIGHUP (a connection that dropped); a second SIGINT ends at
    once. A second SIGTERM does not: a cluster sends it to a worker and to its launchers, which forward it. The list
    gets the numbers of the signals.
    """
    before = signal.getsignal(signal.SIGINT)

    def announce(received: list[int]) -> None:
        if received[-1] != signal.SIGINT:
            return
        signal.signal(signal.SIGINT, before)
        if is_main_process():
            # Not through the progress, which the signal may have interrupted. A reader that is gone ends nothing.
            with suppress(OSError):
                os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    with handle_signals(announce) as received:
        yield received


@contextmanager
def _as_when_loaded(tuned: LoadedModel) -> Iterator[None]:
    """Let a model that trains compute as `load_model` will make it compute: with its kernel, in the dtype of its
    weights unless under autocast. accelerate 1.15 puts autocast around the forward of the model that it prepares, and
    keeps the model's own as `_original_forward`. Under FSDP2 there is none: the sharded layers compute as their policy
    says.
    """
    module: Any = tuned.module
    was_training = module.training
    attention = tuned.kernel
    wrapped = vars(module).get("forward")
    original = None if tuned.autocast else vars(module).get("_original_forward")
    module.eval()
    use_blockwise(module)
    if original is not None:
        module.forward = original
    try:
        yield
    finally:
        if original is not None:
            module.forward = wrapped
        module.set_attn_implementation(attention)
        module.train(was_training)


@contextmanager
def redirect_library_logs(folder: Path) -> Iterator[None]:
    """Append warnings and what libraries log from WARNING on to `libraries.log` in a folder instead of the terminal."""
    handler = logging.FileHandler(folder / LIBRARY_LOG, encoding="utf-8", delay=True)
    handler.setLevel(logging.WARNING)
    root = logging.getLogger()
    root.addHandler(handler)
    logging.captureWarnings(capture=True)
    try:
        with quiet_loading():  # transformers writes to the terminal by itself
            yield
    finally:
        logging.captureWarnings(capture=False)
        root.removeHandler(handler)
        handler.close()
