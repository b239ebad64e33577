"""What a training takes on one kind of device, in numbers and in words."""

from dataclasses import dataclass

from pi_lora.planning.gpus import CPU, GIB, Gpu
from pi_lora.planning.memory import MARGIN, DeviceMemory
from pi_lora.planning.shape import Flops, Shape
from pi_lora.recipe.schema import Recipe
from pi_lora.types import Json

# Assumed: the share of a device's peak that a run reaches, recomputation counted as work. `full` lies between two
# published runs: Qwen3-8B at 1M tokens on 8 H100 (TRL's long-context guide: 380 s per step, 0.45) and LLaMA-7B at 64k
# on 8 A100 (EasyContext: 10,240 tokens/s, 0.50). None is published for LoRA or QLoRA at these lengths: LoRA adds small
# products and casts, QLoRA unpacks every weight three times. The CPU's share gives the demo's 760 steps the five
# minutes that they take on two cores.
ASSUMED_UTILIZATION = {"full": 0.45, "lora": 0.40, "qlora": 0.30, "cpu": 0.38}


@dataclass(frozen=True)
class Target:
    """The model that a plan is for: its shape, its window before it is extended (L) in tokens, and the window that its
    config declares.
    """

    shape: Shape
    original: int
    declared: int


@dataclass(frozen=True)
class TrainingPlan:
    """What a recipe takes on one kind of device; memory is that of each device, `flops` those of the whole training."""

    recipe: Recipe
    target: Target
    gpu: Gpu
    trained: int
    memory: DeviceMemory
    tokens_per_step: int
    flops: Flops

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @property
    def fits(self) -> bool:
        """Whether each device has the memory, and its host, if that is known, what all devices pin."""
        return self.has_room(1)

    def has_room(self, margin: float = MARGIN) -> bool:
        """Return whether it fits with a `margin` of the memory of each device to spare."""
        pinned = self.memory.host * self.recipe.hardware.processes_per_machine
        return self.memory.peak * margin <= self.gpu.memory and (self.gpu.host is None or pinned <= self.gpu.host)

    @property
    def tokens(self) -> int:
        """Tokens that the run trains on."""
        return self.tokens_per_step * self.recipe.training.steps

    @property
    def utilization(self) -> float:
        """The assumed share of the devices' peak."""
        return ASSUMED_UTILIZATION[CPU if self.gpu.name == CPU else self.recipe.tuning.method]

    @property
    def hours(self) -> float | None:
        """Hours of training at the assumed utilization, if the device's peak is known; loading, evaluation and saving
        come on top, and much more where a GPU computes in float32.
        """
        reached = (self.gpu.peak or 0.0) * self.utilization * self.recipe.hardware.processes
        return sum(self.flops) / reached / 3600 if reached else None

    def lines(self) -> list[str]:
        """Return what is tuned, what it needs, and how long it takes."""
        recipe, target, name = self.recipe, self.target, self.recipe.model.name
        hardware, needed = recipe.hardware, self.memory
        how, parameters = f"{recipe.scaling}, {recipe.tuning.method}", f"{_count(self.trained)} parameters train"
        if recipe.tuning.method != "full":
            parameters += f"; {_count(target.shape.parameters)} are frozen"
        each = "each of " if hardware.processes > 1 else ""
        memory = f"{_gib(needed.peak)} of {_gib(self.gpu.memory)} GiB on {each}{hardware.processes} x {self.gpu.name}"
        if hardware.machines > 1:
            memory += f" ({hardware.machines} machines)"
        if self.gpu.host:
            memory += " (this machine's)"
        if needed.host:
            memory += f", {_gib(needed.host)} GiB of its host, pinned in tensors of powers of two"
        parts = ", ".join(f"{part} {_gib(size)}" for part, size in needed.components.items())
        duration = "no hours, since the peak of this device is not known"
        if self.hours:
            duration = f"about {hours_in_words(self.hours)} at {self.utilization:.0%} of the peak (assumed)"
        steps = f"{recipe.training.steps} steps of {self.tokens_per_step:,} tokens, {_count(self.tokens)} in all"
        lines = [
            f"{name}: {target.original} to {recipe.context.target} tokens, {how}; {parameters}",
            f"memory: {memory}",
            f"the most of each part: {parts} GiB",
            f"time: {steps}, {sum(self.flops):.1e} FLOPs: {duration}",
        ]
        if recipe.paper:
            lines.append(f"the paper has: {recipe.paper}")
        if target.original != target.declared:
            lines.append(
                f"context.original: {target.original} tokens, and the config of {name} says {target.declared}; "
                "leave it out if that is right"
            )
        return lines

    def as_json(self) -> Json:
        """Return the plan as `--json` writes it."""
        return {
            "gpu": self.gpu.name,
            "gpus": self.recipe.hardware.processes,
            "bytes": dict(self.memory.components),
            "peak_bytes_per_gpu": self.memory.peak,
            "host_bytes_per_gpu": self.memory.host,
            "fits": self.fits,
            "tokens_per_step": self.tokens_per_step,
            "steps": self.recipe.training.steps,
            "flops": self.flops._asdict(),
            "hours": self.hours,
        }


def hours_in_words(hours: float) -> str:
    """Return hours rounded for reading: minutes below one hour, days above two days.

    >>> hours_in_words(0.001), hours_in_words(0.25), hours_in_words(7.6), hours_in_words(39.1), hours_in_words(100)
    ('a minute', '15 minutes', '7.6 hours', '39 hours', '4.2 days')
    """
    if hours < 1:
        minutes = round(hours * 60)
        return f"{minutes} minutes" if minutes > 1 else "a minute"
    if hours < 48:
        return f"{hours:.1f} hours" if hours < 10 else f"{hours:.0f} hours"
    return f"{hours / 24:.1f} days"


def _gib(size: int) -> str:
    return f"{size / GIB:.3g}"


def _count(number: int) -> str:
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"
