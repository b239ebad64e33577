"""Callbacks of a training: what the log and the line of progress say, number by number."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState

from conftest import refused, small_recipe, train
from pi_lora.errors import Diverged
from pi_lora.recipe.evaluation import Evaluation
from pi_lora.run import TRAINING_LOG, Run
from pi_lora.training import callbacks
from pi_lora.training.callbacks import (
    ScheduledMeasurements,
    StopOnDivergence,
    StopOnSignal,
    TrainingLog,
)
from pi_lora.types import Json


class Training:
    """Steps of a training of three, with times and tokens that the test says."""

    def __init__(self, run: Run, step: int = 0, tokens: int = 0) -> None:
        self.state = TrainerState(global_step=step, max_steps=3, num_input_tokens_seen=tokens)
        self.control = TrainerControl()
        self.shown: list[tuple[int, int, str]] = []
        self.saved: list[list[Json]] = []
        self.log = TrainingLog(run, lambda *shown: self.shown.append(shown), self.saved.append)
        self.log.on_train_begin(None, self.state, self.control)

    def step(self, tokens: int, now: Callable[[float], None], begin: float, end: float) -> None:
        now(begin)
        self.log.on_step_begin(None, self.state, self.control)
        self.state.global_step += 1
        self.state.num_input_tokens_seen += tokens
        now(end)
        self.log.on_step_end(None, self.state, self.control)

    def logs(self, loss: float) -> None:
        logs = {"loss": loss, "learning_rate": 0.1, "grad_norm": 3.5}
        self.log.on_log(None, self.state, self.control, logs)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the time in seconds, and the peak memory of 1.5 GiB."""
    seconds = [0.0]
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: seconds[0])
    monkeypatch.setattr(callbacks, "peak_memory", lambda: 3 * 2**29)
    return lambda time: seconds.__setitem__(0, time)


def test_the_log_has_the_speed_since_the_line_before_without_checkpoints(
    tmp_path: Path, now: Callable[[float], None]
) -> None:
    """Each step takes two seconds or four; a minute between two steps is that of a checkpoint."""
    training = Training(Run(tmp_path))
    training.step(1000, now, begin=10, end=12)
    training.logs(2.5)
    training.step(4000, now, begin=72, end=76)
    training.logs(1.25)
    expected = {"learning_rate": 0.1, "gradient_norm": 3.5, "peak_memory": 3 * 2**29}
    first = {"step": 1, "loss": 2.5, "tokens": 1000, "tokens_per_second": 500.0, "seconds": 2.0, **expected}
    second = {"step": 2, "loss": 1.25, "tokens": 5000, "tokens_per_second": 1000.0, "seconds": 6.0, **expected}
    assert [json.loads(line) for line in (tmp_path / TRAINING_LOG).read_text().splitlines()] == [first, second]
    assert training.saved == []

    # A resumption counts on from the checkpoint, in the time of another process, and the last line is saved whole.
    resumed = Training(Run(tmp_path), step=2, tokens=5000)
    resumed.step(3000, now, begin=1, end=3)
    resumed.logs(1.0)
    third = {"step": 3, "loss": 1.0, "tokens": 8000, "tokens_per_second": 1500.0, "seconds": 8.0, **expected}
    assert resumed.saved == [[first, second, third]]
    assert len((tmp_path / TRAINING_LOG).read_text().splitlines()) == 2


def test_the_line_of_progress_has_loss_speed_and_memory(tmp_path: Path, now: Callable[[float], None]) -> None:
    """Those of the last line of the log, which is written after the step is reported."""
    training = Training(Run(tmp_path))
    for step in range(3):
        training.step(5000, now, begin=step, end=step + 0.5)
        training.logs(2.0 + step / 8)
    line = "loss {} 10,000 tokens/s 1.5 GiB"
    assert training.shown == [(1, 3, ""), (2, 3, line.format("2.000")), (3, 3, line.format("2.125"))]


def test_a_checkpoint_has_a_line_of_the_log_and_the_last_step_needs_none(
    tmp_path: Path, now: Callable[[float], None]
) -> None:
    """Otherwise the seconds since the last line would be lost with a resumption."""
    training = Training(Run(tmp_path))
    asked = []
    for saves in (False, True, True):
        training.control = TrainerControl(should_save=saves)
        training.step(1, now, begin=0, end=1)
        asked.append((training.control.should_log, training.control.should_save))
    assert asked == [(False, False), (True, True), (True, False)]


def test_lines_without_a_loss_are_not_logged(tmp_path: Path, now: Callable[[float], None]) -> None:
    training = Training(Run(tmp_path))
    training.log.on_log(None, training.state, training.control, {"train_runtime": 3.0})
    assert list(tmp_path.iterdir()) == []


MEASURED = {"perplexity": {"data": "builtin:stdlib"}, "passkey": {}}


@pytest.mark.parametrize(
    ("step", "kept", "measured"),
    [
        (0, [], [0]),
        (2, ["perplexity"], [2]),
        (2, ["perplexity", "passkey"], []),
        (1, [], []),
        (3, [], []),
    ],
)
def test_a_resumption_measures_its_step_only_if_scores_are_missing(
    step: int, kept: list[str], measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second step of three is measured, and the last one when the run is saved."""
    run = Run(tmp_path)
    for name in kept:
        file = run.scores_file(name, f"step {step}")
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
    done: list[int] = []
    monkeypatch.setattr(ScheduledMeasurements, "measure_at", lambda _self, step: done.append(step))
    anything: Any = None
    evaluation = Evaluation.model_validate({"every": 2 if step < 3 else 3, **MEASURED})
    callback = ScheduledMeasurements(evaluation, anything, run, StopOnSignal([]))
    callback.on_train_begin(None, TrainerState(global_step=step, max_steps=3), TrainerControl())
    assert done == measured


@pytest.mark.parametrize(("stopped", "measured"), [(False, [2]), (True, [])])
def test_a_measurement_follows_its_checkpoint_unless_a_signal_ends_the_training(
    stopped: bool, measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    monkeypatch.setattr(ScheduledMeasurements, "measure_at", lambda _self, step: done.append(step))
    anything: Any = None
    stop = StopOnSignal([], stopped=stopped)
    callback = ScheduledMeasurements(Evaluation.model_validate({"every": 2, **MEASURED}), anything, Run(tmp_path), stop)
    for step in (1, 2, 3):
        state, control = TrainerState(global_step=step, max_steps=4), TrainerControl()
        callback.on_step_end(None, state, control)
        assert control.should_save == (step == 2)
        callback.on_save(None, state, control)
    assert done == measured


@pytest.mark.parametrize(("step", "signals", "ends"), [(1, [], False), (1, [15], True), (3, [15], False)])
def test_a_signal_ends_a_training_after_its_step_with_a_checkpoint(step: int, signals: list[int], ends: bool) -> None:
    """In the last step it is too late: the finished run is saved next."""
    stop, control = StopOnSignal(signals), TrainerControl()
    stop.on_step_end(None, TrainerState(global_step=step, max_steps=3), control)
    assert (stop.stopped, control.should_save, control.should_training_stop) == (ends, ends, ends)


@pytest.mark.parametrize(
    ("losses", "weight", "saves", "step", "line"),
    [
        ([1.0, 2.0], 1.0, True, 1, None),
        ([1.0, torch.inf, 2.0], 1.0, False, 1, "the loss of step 1"),
        ([1.0], torch.nan, False, 1, None),
        ([1.0], torch.nan, True, 1, "the weights of step 1"),
        ([1.0], torch.nan, False, 3, "the weights of step 3"),
    ],
)
def test_a_training_ends_where_loss_or_saved_weights_are_not_finite(
    losses: list[float], weight: float, saves: bool, step: int, line: str | None, tmp_path: Path
) -> None:
    """Those that train: what is frozen is not watched."""
    model = torch.nn.Linear(1, 1)
    model.weight.data.fill_(weight)
    model.bias.requires_grad_(False).fill_(torch.inf)
    stop = StopOnDivergence(Run(tmp_path))
    for loss in losses:
        stop.record_loss(torch.tensor(loss))
    state, control = TrainerState(global_step=step, max_steps=3), TrainerControl(should_save=saves)
    arguments = SimpleNamespace(learning_rate=2e-4)
    if line is None:
        stop.on_step_end(arguments, state, control, model=model)
        return
    with refused(Diverged, f"training.learning_rate: {line} ", 0.0002):
        stop.on_step_end(arguments, state, control, model=model)


def test_steps_measured_on_the_training_text_are_marked(small_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The door is open and the road is long. " * 500)
    recipe = small_recipe(
        small_model,
        data={"source": [{"name": str(text)}]},
        evaluation={"every": 2, "perplexity": {"data": str(text), "windows": [64]}},
    )
    scores = train(recipe, tmp_path / "run") / "scores"
    assert not json.loads((scores / "perplexity-step-0.json").read_text()).get("tuned_on")
    assert json.loads((scores / "perplexity-step-2.json").read_text())["tuned_on"]
