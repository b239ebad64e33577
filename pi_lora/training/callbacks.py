"""What watches a training: its log and that of libraries, a clean end after a signal, and the measurements."""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from pi_lora.distributed import (
    any_process,
    handle_signals,
    is_main_process,
    wait_for_all_processes,
    world_size,
)
from pi_lora.errors import Diverged, Interrupted
from pi_lora.evaluation.suite import measure, requested_measurements, write_scores
from pi_lora.models.machine import SDPA
from pi_lora.models.model import Model
from pi_lora.models.weights import finite, quiet_loading
from pi_lora.recipe.schema import Recipe
from pi_lora.run import CHECKPOINTS, TRAINING_LOG, Run
from pi_lora.storage import write_whole
from pi_lora.types import Progress

LIBRARY_LOG = "libraries.log"


class Monitor(TrainerCallback):
    """Write training.jsonl of a `run`, report progress, mark checkpoints that are complete, and measure the `model`.
    End training after the step in which a signal came, or the loss or weights that are to be saved became infinite or
    NaN. `signals` gets the numbers of the signals that come.

    As in tables 3 and 4 of the paper, the model is measured at step 0, every `evaluation.every` steps and the last,
    into `scores/NAME-step-N.json`, after a checkpoint was written. Each process measures its part; the first one
    writes.
    """

    def __init__(self, recipe: Recipe, model: Model, run: Run, signals: Sequence[int], progress: Progress) -> None:
        self.recipe, self.model, self.run, self.signals, self.progress = recipe, model, run, signals, progress
        self.stopped = False
        self.finite: torch.Tensor | bool = True
        self.seconds, self.line = 0.0, ""

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record whether a loss is finite, without waiting for the device."""
        self.finite = torch.isfinite(loss).all() & self.finite

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Keep the log of the steps before the checkpoint. Measure step 0, extended but not tuned, or the step of a
        checkpoint whose measuring was interrupted.
        """
        step = state.global_step
        kept = [line for line in self.run.log if line["step"] <= step]
        self.seconds = kept[-1]["seconds"] if kept else 0.0
        self.logged = self.seconds, state.num_input_tokens_seen
        if is_main_process():
            write_whole(self.run.path / TRAINING_LOG, "".join(json.dumps(line) + "\n" for line in kept))
        files = [
            self.run.scores_file(name, f"step {step}")
            for name in requested_measurements(self.recipe.evaluation.in_short())
        ]
        if self._is_due(step) and any_process(is_main_process() and not all(map(Path.is_file, files)))[0]:
            self.measure(self.run, step)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock, which runs in steps alone: not while a checkpoint is written, or the model measured."""
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any) -> None:
        """Report the step; log the last one; stop after a checkpoint if any process received a signal."""
        step = state.global_step
        # All processes act on this answer; a signal that comes later counts from the next step on.
        asked_to_stop, diverged = any_process(bool(self.signals), not self.finite)
        self.seconds += time.perf_counter() - self.began
        control.should_save = control.should_save or self._is_due(step)
        ends, which = step == state.max_steps, "loss"
        if not diverged and (ends or asked_to_stop or control.should_save):
            # The loss of a step says nothing of the weights after it, which are about to be saved.
            trained = (weight.detach() for weight in model.parameters() if weight.requires_grad)
            own = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained)
            [diverged], which = any_process(not all(map(finite, own))), "weights"
        if diverged:
            good = self.run.last_checkpoint
            kept = f" (the last good checkpoint is kept: {good})" if good else ""
            raise Diverged(
                f"training.learning_rate: the {which} of step {step} became infinite or NaN at a rate of "
                f"{args.learning_rate:g}; lower it and start again{kept}"
            )
        self.progress(step, state.max_steps, self.line)
        if ends:
            # The finished run is saved next; it needs no checkpoint.
            control.should_log, control.should_save = True, False
        elif asked_to_stop:
            self.stopped = control.should_save = control.should_training_stop = True
        # Seconds after the last line would be lost on resume.
        control.should_log = control.should_log or control.should_save

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Mark the checkpoint as complete when every process has written its part; then measure, if it is time to."""
        wait_for_all_processes()
        if is_main_process():
            self.run.mark_complete(self.run.path / CHECKPOINTS / f"checkpoint-{state.global_step}")
        wait_for_all_processes()
        if self._is_due(state.global_step) and not self.stopped:
            self.measure(self.run, state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: Any) -> None:
        """Append a line: loss in nats a token, rate, tokens so far, tokens a second, peak memory in bytes."""
        if "loss" not in logs:
            return
        tokens, (seconds_before, tokens_before) = state.num_input_tokens_seen, self.logged
        speed = (tokens - tokens_before) / (self.seconds - seconds_before)
        self.logged = self.seconds, tokens
        line = {
            "step": state.global_step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "gradient_norm": logs["grad_norm"],
            "tokens": tokens,
            "tokens_per_second": round(speed, 1),
            "peak_memory": peak_memory(),
            "seconds": round(self.seconds, 2),
        }
        if is_main_process():
            with (self.run.path / TRAINING_LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.line = f"loss {logs['loss']:.3f} {speed:,.0f} tokens/s {line['peak_memory'] / 2**30:.1f} GiB"

    def measure(self, run: Run, step: int) -> None:
        """Measure this step into `run`; raise Interrupted after a signal."""

        def stop_if_signalled(done: int, total: int, note: str = "") -> None:
            # Of several processes each measures another part: all of them come to its end.
            if self.signals and world_size() == 1:
                raise Interrupted(
                    f"{self.model.name}: interrupted while step {step} was measured; "
                    "continue with --resume, or measure a finished run by pi-lora eval all"
                )

        with _as_when_loaded(self.model):
            scores = measure(self.model, self.recipe.evaluation, stop_if_signalled)
        for name, result in scores.items() if is_main_process() else ():
            write_scores([result.model_copy(update={"step": step})], run.scores_file(name, f"step {step}"))

    def _is_due(self, step: int) -> bool:
        every, last = self.recipe.evaluation.every, self.recipe.training.steps
        return every is not None and step % every == 0 and step < last


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

    def note(received: list[int]) -> None:
        if received[-1] == signal.SIGINT:
            signal.signal(signal.SIGINT, before)
            # Not through the progress, in whose midst the signal may have come. A reader that is gone ends nothing.
            with suppress(OSError):
                os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n" if is_main_process() else b"")

    with handle_signals(note) as received:
        yield received


@contextmanager
def _as_when_loaded(tuned: Model) -> Iterator[None]:
    """Let a model that trains compute as it will when `load` reads it back: with torch's kernel, in its weights' dtype
    unless under autocast. accelerate 1.15 puts it around the forward of the model that it prepares, and keeps the
    model's own as `_original_forward`. Under FSDP2 there is none: the sharded layers compute as their policy
    says.
    """
    model: Any = tuned.model
    training, attention, wrapped = model.training, tuned.kernel, vars(model).get("forward")
    own = None if tuned.autocast else vars(model).get("_original_forward")
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


@contextmanager
def redirect_library_logs(folder: Path) -> Iterator[None]:
    """Append warnings and what libraries log from WARNING on to `libraries.log` in a folder instead of the terminal."""
    handler, root = logging.FileHandler(folder / LIBRARY_LOG, encoding="utf-8", delay=True), logging.getLogger()
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        with quiet_loading():  # transformers writes to the terminal by itself
            yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        handler.close()
