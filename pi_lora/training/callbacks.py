"""What watches a training: its log and that of libraries, a clean end after a signal, and the measurements."""

import json
import logging
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers import logging as transformers_logging

from pi_lora.distributed import (
    HANG_UP,
    any_process,
    handle_signals,
    is_leader,
    leave_lost_terminals,
    number_of_processes,
    wait_for_all,
)
from pi_lora.errors import Diverged, Interrupted
from pi_lora.evaluation.suite import asked_for, measure, write_scores
from pi_lora.models import machine
from pi_lora.models.model import Model
from pi_lora.models.weights import finite
from pi_lora.recipe.schema import Recipe
from pi_lora.run import CHECKPOINTS, TRAINING_LOG, Run
from pi_lora.types import Progress, silent
from pi_lora.writing import write_whole

LIBRARY_LOG = "libraries.log"
# Their loggers have handlers of their own, which write to the terminal, and pass nothing on.
NON_PROPAGATING_LOGGERS = ("transformers", "datasets", "huggingface_hub")


class TrainingLog(TrainerCallback):
    """Write training.jsonl of a `run`, report progress, and mark checkpoints that are complete. End training after the
    step in which a signal came, or the loss or weights that are to be saved became infinite or NaN. Without
    `tokens_per_step` the trainer counts all but padding. Steps that are measured are saved before, `save_every`.
    """

    run: Run

    def __init__(self, tokens_per_step: int | None, save_every: int | None = None, progress: Progress = silent) -> None:
        self.tokens_per_step, self.save_every, self.progress = tokens_per_step, save_every, progress
        self.signalled = self.stopped = False
        self.finite: torch.Tensor | bool = True
        self.last_tokens, self.line = 0, ""
        self.started = self.last_time = time.monotonic()

    def record_loss(self, loss: torch.Tensor) -> None:
        """Record whether a loss is finite, without waiting for the device."""
        self.finite = torch.isfinite(loss).all() & self.finite

    def exclude_time(self, seconds: float) -> None:
        """Do not count `seconds`, in which something was measured."""
        self.started += seconds
        self.last_time += seconds

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin counting; after a resume, keep the lines of the steps before the checkpoint."""
        self.last_time, self.last_tokens = time.monotonic(), self._tokens(state)
        kept = [line for line in self.run.log if line["step"] <= state.global_step]
        self.started = self.last_time - (kept[-1].get("seconds", 0.0) if kept else 0.0)
        if is_leader():
            write_whole(self.run.path / TRAINING_LOG, "".join(json.dumps(line) + "\n" for line in kept))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any) -> None:
        """Report the step; log the last one; stop after a checkpoint if any process received a signal."""
        step = state.global_step
        # All processes act on this answer; a signal that comes later counts from the next step on.
        if self.save_every and step % self.save_every == 0:
            control.should_save = True
        asked_to_stop, diverged = any_process(self.signalled, not self.finite)
        ends, which = step == state.max_steps, "loss"
        if not diverged and (ends or asked_to_stop or control.should_save):
            # The loss of a step says nothing of the weights after it, which are about to be saved.
            trained = (weight.detach() for weight in model.parameters() if weight.requires_grad)
            own = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained)
            [diverged], which = any_process(not all(map(finite, own))), "weights"
        if diverged:
            good = self.run.last_checkpoint
            kept = f" (the last good checkpoint is kept: {good})" if good else ""
            at = f"the {which} of step {step} became infinite or NaN at a rate of {args.learning_rate:g}"
            raise Diverged(f"training.learning_rate: {at}; lower it and start again{kept}")
        self.progress(step, state.max_steps, self.line)
        if ends:
            # The finished run is saved next; it needs no checkpoint.
            control.should_log, control.should_save = True, False
        elif asked_to_stop:
            self.stopped = control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Mark the checkpoint as complete when every process has written its part."""
        wait_for_all()
        if is_leader():
            self.run.mark_complete(self.run.path / CHECKPOINTS / f"checkpoint-{state.global_step}")
        wait_for_all()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: Any) -> None:
        """Append a line: loss in nats a token, rate, tokens so far, tokens a second, peak memory in bytes."""
        if "loss" not in logs:
            return
        now, tokens = time.monotonic(), self._tokens(state)
        speed = (tokens - self.last_tokens) / max(now - self.last_time, 1e-9)
        self.last_time, self.last_tokens = now, tokens
        line = {
            "step": state.global_step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "gradient_norm": logs["grad_norm"],
            "tokens": tokens,
            "tokens_per_second": round(speed, 1),
            "peak_memory": peak_memory(),
            "seconds": round(now - self.started, 2),
        }
        if is_leader():
            with (self.run.path / TRAINING_LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.line = f"loss {logs['loss']:.3f} {speed:,.0f} tokens/s {line['peak_memory'] / 2**30:.1f} GiB"

    def _tokens(self, state: TrainerState) -> int:
        per_step = self.tokens_per_step
        return int(state.num_input_tokens_seen if per_step is None else state.global_step * per_step)


def peak_memory() -> int:
    """Return the peak memory of this process in bytes: of the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource  # which Windows does not have

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def stop_after_step(log: TrainingLog) -> Iterator[None]:
    """Let the current step end after SIGINT, SIGTERM or SIGHUP (a connection that dropped); a second SIGINT ends at
    once. A second SIGTERM does not: a cluster sends it to a worker and to its launchers, which forward it.
    """
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: types.FrameType | None) -> None:
        log.signalled = True
        if number == signal.SIGINT:
            signal.signal(number, before)
            # Not through the progress, in whose midst the signal may have come. A reader that is gone ends nothing.
            with suppress(OSError):
                os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n" if is_leader() else b"")
        if number == HANG_UP:
            leave_lost_terminals()

    with handle_signals(note):
        yield


class TrainingScores(TrainerCallback):
    """Measure the model at step 0, every `evaluation.every` steps and the last, as in tables 3 and 4 of the paper, into
    `scores/NAME-step-N.json`. Each process measures its part; the first one writes. A checkpoint is written before.
    """

    def __init__(self, recipe: Recipe, model: Model, log: TrainingLog) -> None:
        self.asked, self.last, self.model, self.log = recipe.evaluation, recipe.training.steps, model, log
        # With the kernel of a model that is loaded.
        self.attention = model.attention("auto", machine.dtype_of_base(recipe) == torch.bfloat16)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Measure step 0, interpolated but not tuned, or the step of a checkpoint whose measuring was interrupted."""
        step, run = state.global_step, self.log.run
        files = [run.scores_file(name, f"step {step}") for name in asked_for(self.asked.in_short())]
        missing = is_leader() and not all(file.is_file() for file in files)
        if any_process(missing)[0] and self._is_due(step):
            self.measure(run, step)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Measure if it is time to."""
        if self._is_due(state.global_step) and not self.log.stopped:
            self.measure(self.log.run, state.global_step)

    def _is_due(self, step: int) -> bool:
        return step % (self.asked.every or self.last) == 0 and step < self.last

    def measure(self, run: Run, step: int) -> None:
        """Measure this step into `run`; raise Interrupted after a signal."""
        started = time.monotonic()

        def stop_if_signalled(done: int, total: int, note: str = "") -> None:
            # Of several processes each measures another part: all of them come to its end.
            if self.log.signalled and number_of_processes() == 1:
                how = "continue with --resume, or measure a finished run by pi-lora eval all"
                raise Interrupted(f"{self.model.name}: interrupted while step {step} was measured; {how}")

        with _as_when_loaded(self.model, self.attention):
            scores = measure(self.model, self.asked, stop_if_signalled)
        if is_leader():
            for name, result in scores.items():
                write_scores(result.model_copy(update={"step": step}), run.scores_file(name, f"step {step}"))
        self.log.exclude_time(time.monotonic() - started)


@contextmanager
def _as_when_loaded(tuned: Model, kernel: str) -> Iterator[None]:
    """Let a model that trains compute as it will when `load` reads it back: with that kernel, in its weights' dtype
    unless under autocast. accelerate 1.15 puts it around the forward of the model that it prepares, and keeps the
    model's own beside it as `_original_forward`. Under FSDP2 there is none: the sharded layers compute as their policy
    says.
    """
    model: Any = tuned.model
    training, attention, wrapped = model.training, tuned.kernel, vars(model).get("forward")
    own = None if tuned.autocast else vars(model).get("_original_forward")
    model.eval()
    model.set_attn_implementation(kernel)
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
    """Append warnings and what is logged from WARNING on to `libraries.log` in a folder, and show no progress bar but
    ours.
    """
    handler = logging.FileHandler(folder / LIBRARY_LOG, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    root, *others = loggers = [logging.getLogger(name) for name in (None, *NON_PROPAGATING_LOGGERS)]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    transformers_logging.disable_progress_bar()
    # What a program that calls `train` wants to hear as well goes through the root.
    root.addHandler(handler)
    for logger in others:
        logger.handlers[:] = [] if logger.propagate else [handler]
        logger.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, handlers, level in before:
            logger.handlers[:] = handlers
            logger.setLevel(level)
        handler.close()
