"""How long a measurement takes on this machine: the operations of the forward passes over the assumed speed, as in the
plan of a training, or over the speed of the first pass where no speed is known.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from pi_lora.errors import ModelError
from pi_lora.models.device import device, dtype_named, processor_peak
from pi_lora.models.loaded import LoadedModel
from pi_lora.models.shape import Shape
from pi_lora.planning.flops import flops_of_forward
from pi_lora.planning.gpus import device_here
from pi_lora.planning.training_plan import ASSUMED_UTILIZATION, CPU_UTILIZATION, hours_in_words
from pi_lora.recipe.budget import budget_of

# A pass over the tokens between two numbers: those before the first are in the KV cache.
Pass = tuple[int, int]
# Durations of fewer seconds are not worth a line.
SHORT = 20.0


def budget_here() -> int:
    """Return the tokens that go through a model in a measurement on this machine by default."""
    return budget_of(device().type == "cpu")


class Clock(NamedTuple):
    """Counts the operations of the forward passes of a loaded model.

    Attributes:
        shape: The shape of the model, or None if it has no layers that can be counted: tokens are counted then.
        on_cpu: Whether the model is on a CPU.
        speed: The assumed FLOP/s, or None if it is not known.
    """

    shape: Shape | None
    on_cpu: bool
    speed: float | None

    def work(self, passes: Iterable[Pass]) -> float:
        """Return the operations of forward passes."""
        return sum(self._flops(stop) - self._flops(start) for start, stop in passes)

    def _flops(self, tokens: int) -> float:
        if self.shape is None or tokens == 0:
            return float(tokens)
        return flops_of_forward(self.shape, tokens, on_cpu=self.on_cpu)


def clock_of(loaded: LoadedModel) -> Clock:
    """Return the clock of a loaded model on this machine."""
    on_cpu = loaded.module.device.type == "cpu"
    try:
        return Clock(loaded.source.shape, on_cpu, _speed(loaded, on_cpu))
    except ModelError:
        return Clock(None, on_cpu, None)


def _speed(loaded: LoadedModel, on_cpu: bool) -> float | None:
    """Return the FLOP/s of a forward pass; None for a dtype or a device whose speed is not known."""
    if on_cpu:
        utilization = CPU_UTILIZATION.get(loaded.dtype)
        return utilization and utilization * processor_peak(dtype_named(loaded.dtype))
    peak = device_here().peak
    in_float32 = loaded.dtype == "float32" and not loaded.autocast
    return None if peak is None or in_float32 else peak * ASSUMED_UTILIZATION["lora"]


def duration_in_words(seconds: float) -> str:
    """Return how long a measurement takes on the device of this machine."""
    here = "this CPU" if device().type == "cpu" else f"this {torch.cuda.get_device_name()}"
    return f"about {hours_in_words(seconds / 3600)} on {here}"
