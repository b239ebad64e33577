"""The log of a training: a line every few steps, the progress, and a clean end after a signal."""

import json
import resource
import signal
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from pi_lora.distributed import any_process, is_leader
from pi_lora.errors import Diverged
from pi_lora.run_folder import TRAINING_LOG, last_checkpoint, read_training_log
from pi_lora.types import Progress, silent


class TrainingLog(TrainerCallback):
    """Write training.jsonl, report progress, and end training after the step in which a signal came or the loss became
    infinite or NaN. Without `tokens_per_step` the trainer counts tokens, padding excluded.
    """

    def __init__(self, folder: Path, tokens_per_step: int | None, progress: Progress = silent) -> None:
        self.path = folder / TRAINING_LOG
        self.tokens_per_step, self.progress = tokens_per_step, progress
        self.signalled = self.stopped = False
        self.finite: torch.Tensor | None = None
        self.step = self.last_tokens = 0
        self.started = self.last_time = time.monotonic()
        self.seconds_before, self.line = 0.0, ""

    def saw(self, loss: torch.Tensor) -> None:
        """Record whether a loss is finite, without waiting for the device."""
        finite = torch.isfinite(loss).all()
        self.finite = finite if self.finite is None else self.finite & finite

    def not_training(self, seconds: float) -> None:
        """Do not count `seconds`, in which something was measured."""
        self.started += seconds
        self.last_time += seconds

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin counting; after a resume, keep the lines of the steps before the checkpoint."""
        self.started = self.last_time = time.monotonic()
        self.step, self.last_tokens = state.global_step, self._tokens(state)
        kept = [line for line in read_training_log(self.path) if line["step"] <= state.global_step]
        self.seconds_before = kept[-1]["seconds"] if kept else 0.0
        if is_leader():
            self.path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report the step; log the last one; stop after a checkpoint if any process received a signal."""
        self.step = state.global_step
        finite = self.finite is None or bool(self.finite)
        # All processes act on this answer; a signal that comes later counts from the next step on.
        asked_to_stop, diverged = any_process(self.signalled, not finite)
        if diverged:
            good = last_checkpoint(self.path.parent)
            kept = f" (the last good checkpoint is kept: {good})" if good else ""
            at = f"the loss of step {self.step} is not a finite number at a rate of {args.learning_rate:g}"
            raise Diverged(f"training.learning_rate: {at}; lower it and start again{kept}")
        self.progress(state.global_step, state.max_steps, self.line)
        if state.global_step == state.max_steps:
            # The finished run is saved next; it needs no checkpoint.
            control.should_log, control.should_save = True, False
        elif asked_to_stop:
            self.stopped = control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: Any) -> None:
        """Append a line: loss in nats a token, rate, tokens so far, tokens a second, peak memory in bytes."""
        if "loss" not in logs:
            return
        now = time.monotonic()
        tokens = self._tokens(state)
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
            "seconds": round(self.seconds_before + now - self.started, 2),
        }
        if is_leader():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self.line = f"loss {logs['loss']:.3f}  {speed:,.0f} tokens/s  {line['peak_memory'] / 2**30:.1f} GiB"

    def _tokens(self, state: TrainerState) -> int:
        if self.tokens_per_step is None:
            return int(state.num_input_tokens_seen)
        return int(state.global_step * self.tokens_per_step)


def peak_memory() -> int:
    """Return the peak memory of this process in bytes: of the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def ends_after_the_step(log: TrainingLog) -> Iterator[None]:
    """Let the current step end after SIGINT or SIGTERM; a second SIGINT ends at once. A second SIGTERM does not: a
    cluster sends it to a worker and to its launchers, which forward it.
    """

    def note(number: int, frame: types.FrameType | None) -> None:
        log.signalled = True
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
