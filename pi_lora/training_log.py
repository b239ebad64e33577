"""What is kept of a training while it goes on: a line every few steps, the progress, and a clean end at a signal."""

import json
import resource
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

TRAINING_LOG = "training.jsonl"

Progress = Callable[[int, int, str], None]


class TrainingLog(TrainerCallback):
    """Writes training.jsonl, reports progress, and ends training after the current step when asked to."""

    def __init__(self, folder: Path, tokens_per_step: int, progress: Progress | None) -> None:
        self.path = folder / TRAINING_LOG
        self.tokens_per_step = tokens_per_step
        self.progress = progress
        self.interrupted = False
        self.step = 0
        self.started = self.last_time = time.monotonic()
        self.last_step = 0
        self.seconds_before = 0.0
        self.line = ""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin counting; after a resume, keep the lines of the steps that stand."""
        self.started = self.last_time = time.monotonic()
        self.step = self.last_step = state.global_step
        kept = [line for line in read_training_log(self.path) if line["step"] <= state.global_step]
        self.seconds_before = kept[-1]["seconds"] if kept else 0.0
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report the step; log the last one; stop behind a checkpoint if a signal came."""
        self.step = state.global_step
        if self.progress:
            self.progress(state.global_step, state.max_steps, self.line)
        if state.global_step == state.max_steps:
            control.should_log = True
        elif self.interrupted:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: Any) -> None:
        """Append a line: loss in nats a token, rate, tokens so far, tokens a second, peak memory in bytes."""
        if "loss" not in logs:
            return
        now = time.monotonic()
        speed = (state.global_step - self.last_step) * self.tokens_per_step / max(now - self.last_time, 1e-9)
        self.last_time, self.last_step = now, state.global_step
        line = {
            "step": state.global_step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "tokens": state.global_step * self.tokens_per_step,
            "tokens_per_second": round(speed, 1),
            "peak_memory": peak_memory(),
            "seconds": round(self.seconds_before + now - self.started, 2),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.line = f"loss {logs['loss']:.3f}  {speed:,.0f} tokens/s  {line['peak_memory'] / 2**30:.1f} GiB"


def read_training_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a training.jsonl; none if there is no such file yet."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def peak_memory() -> int:
    """The most memory this process held, in bytes: of the GPU where there is one, else resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def ends_after_the_step(log: TrainingLog) -> Iterator[None]:
    """While training, the first SIGINT or SIGTERM lets the current step end; a second one ends at once."""

    def note(number: int, frame: types.FrameType | None) -> None:
        log.interrupted = True
        for each, handler in before.items():
            signal.signal(each, handler)

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
