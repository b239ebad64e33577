"""The plan of a training on one kind of device: memory, operations and hours, in numbers and in words."""

from dataclasses import dataclass
from functools import cached_property

from pi_lora.errors import PiLoraError
from pi_lora.models.files import methods_on
from pi_lora.models.shape import Shape
from pi_lora.models.source import ModelSource
from pi_lora.planning.flops import Flops, flops_of_training, trained_parameters
from pi_lora.planning.gpus import CPU, GIB, Gpu
from pi_lora.planning.memory import MARGIN, DeviceMemory, bytes_of_linear_weights, memory
from pi_lora.recipe.schema import Recipe
from pi_lora.types import Json

# The share of the peak of a device that a run is assumed to reach, with recomputation counted as work: measured on an
# H200 with LLaMA-7B at 16k (docs/performance.md). Published runs of full tuning: Qwen3-8B at 1M tokens on 8 H100 (TRL's
# long-context guide: 380 s per step, 0.45) and LLaMA-7B at 64k on 8 A100 (EasyContext: 10,240 tokens/s, 0.50).
ASSUMED_UTILIZATION = {"full": 0.46, "lora": 0.40, "qlora": 0.39}
# The same of a CPU, of the measured speed of products of matrices: the built-in model reached 35 % of it on two cores
# without AVX-512, SmolLM2-135M 42 %. In bfloat16 all else takes a larger share of the time.
CPU_UTILIZATION = {"float32": 0.38, "bfloat16": 0.28}


@dataclass(frozen=True)
class PlannedModel:
    """The model that a plan is for.

    Attributes:
        shape: The shape of the model.
        original: The window before the extension (L), in tokens.
        notes: What a user should know of the extension.
        methods: The values of `tuning.method` to choose from: QLoRA of weights that are stored quantized is LoRA.
        linear_bytes: Bytes of a linear weight that stays quantized as it is stored; None if none does.
    """

    shape: Shape
    original: int
    notes: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("lora", "qlora", "full")
    linear_bytes: float | None = None


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of a recipe on one kind of device."""

    recipe: Recipe
    model: PlannedModel
    gpu: Gpu

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @cached_property
    def trained(self) -> int:
        """The number of trained parameters."""
        return trained_parameters(self.model.shape, self.recipe.tuning)

    @cached_property
    def memory(self) -> DeviceMemory:
        """The memory of one device."""
        return memory(
            self.model.shape,
            self.recipe,
            self.model.original,
            self.gpu,
            linear_bytes=self.model.linear_bytes,
        )

    @property
    def sequence_tokens(self) -> int:
        """The tokens of a sequence."""
        return self.recipe.data.tokens_per_sequence(self.model.original, self.recipe.context.target)

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a global batch."""
        return self.recipe.training.global_batch_size * self.sequence_tokens

    @cached_property
    def flops(self) -> Flops:
        """The operations of the whole training."""
        return flops_of_training(
            self.model.shape,
            self.recipe.tuning,
            self.recipe.training,
            self.sequence_tokens,
            loss_in_place=self.gpu.name == CPU,
            attention=self.recipe.model.attention,
        )

    @property
    def fits(self) -> bool:
        """Whether a device has the memory, and the host, if its memory is known, holds what all devices pin."""
        return self.has_room(1)

    def has_room(self, margin: float = MARGIN) -> bool:
        """Return whether the training fits with its peak memory times `margin`."""
        if self.memory.peak * margin > self.gpu.memory:
            return False
        pinned = self.memory.host * self.recipe.hardware.processes_per_machine
        return self.gpu.host is None or pinned <= self.gpu.host

    @property
    def tokens(self) -> int:
        """Tokens that the run trains on."""
        return self.tokens_per_step * self.recipe.training.steps

    @property
    def utilization(self) -> float:
        """The assumed share of the peak of the devices."""
        if self.gpu.name == CPU:
            return CPU_UTILIZATION["bfloat16" if self.gpu.bfloat16 else "float32"]
        return ASSUMED_UTILIZATION[self.recipe.tuning.method]

    @property
    def hours(self) -> float | None:
        """Hours of training at the assumed utilization, if the peak of the device is known.

        Loading, evaluation and saving come on top, and much more where a GPU computes in float32.
        """
        if not self.gpu.peak:
            return None
        flops_per_second = self.gpu.peak * self.utilization * self.recipe.hardware.processes
        return sum(self.flops) / flops_per_second / 3600

    def lines(self) -> list[str]:
        """Return the plan in words: the extension, the memory and the time."""
        name = self.recipe.model.name
        original = self.model.original
        parts = ", ".join(f"{part} {_gib(size)}" for part, size in self.memory.components.items())
        lines = [
            f"{name}: {original} to {self.recipe.context.target} tokens, {self._tuning_in_words()}",
            f"memory: {self._memory_in_words()}",
            f"largest size of each part: {parts} GiB",
            f"time: {self._time_in_words()}",
        ]
        if self.recipe.paper:
            lines.append(f"the paper has: {self.recipe.paper}")
        return [*lines, *self.model.notes]

    def _tuning_in_words(self) -> str:
        method = self.recipe.tuning.method
        words = f"{self.recipe.scaling}, {method}; {_count(self.trained)} parameters train"
        if method != "full":
            words += f"; {_count(self.model.shape.parameters)} are frozen"
        return words

    def _memory_in_words(self) -> str:
        hardware = self.recipe.hardware
        devices = f"{hardware.processes} x {self.gpu.name}"
        if hardware.processes > 1:
            devices = f"each of {devices}"
        words = f"{_gib(self.memory.peak)} of {_gib(self.gpu.memory)} GiB on {devices}"
        if hardware.machines > 1:
            words += f" ({hardware.machines} machines)"
        if self.gpu.host:
            words += " (this machine's)"
        if self.memory.host:
            words += f", {_gib(self.memory.host)} GiB of its host, pinned in tensors of powers of two"
        return words

    def _time_in_words(self) -> str:
        duration = "no hours, since the peak of this device is not known"
        if self.hours:
            duration = f"about {hours_in_words(self.hours)} at {self.utilization:.0%} of the peak (assumed)"
        steps = f"{self.recipe.training.steps} steps of {self.tokens_per_step:,} tokens"
        return f"{steps}, {_count(self.tokens)} in all, {sum(self.flops):.1e} FLOPs: {duration}"

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


def plan_training(recipe: Recipe, source: ModelSource, gpu: Gpu) -> TrainingPlan:
    """Plan the training of `recipe` on `gpu`, from the shape of its model; raise PiLoraError if that is a CPU and the
    recipe asks for GPUs.
    """
    rope = source.base.rope if source.extension else source.rope
    original = recipe.context.original or rope.trained
    linear_bytes = bytes_of_linear_weights(source.base.config)
    model = PlannedModel(
        source.shape,
        original,
        notes=tuple(source.notes),
        methods=("lora",) if linear_bytes else methods_on(source.base.config),
        linear_bytes=linear_bytes,
    )
    if gpu.name == CPU and recipe.hardware.gpus:
        raise PiLoraError("--gpu: cpu: the recipe asks for hardware.gpus; name a GPU, or set hardware.gpus=null")
    return TrainingPlan(recipe, model, gpu)


def hours_in_words(hours: float) -> str:
    """Return hours rounded for reading: minutes below one hour, days above two days.

    >>> hours_in_words(0.001), hours_in_words(0.25), hours_in_words(7.6), hours_in_words(39.1), hours_in_words(100)
    ('a minute', '15 minutes', '7.6 hours', '39 hours', '4.2 days')
    """
    if hours < 1:
        minutes = round(hours * 60)
        return f"{minutes} minutes" if minutes > 1 else "a minute"
    if hours < 48:
        digits = 1 if hours < 10 else 0
        return f"{hours:.{digits}f} hours"
    return f"{hours / 24:.1f} days"


def _gib(size: int) -> str:
    return f"{size / GIB:.3g}"


def _count(number: int) -> str:
    if number < 1e6:
        return f"{number:,}"
    if number < 1e9:
        return f"{number / 1e6:.3g} M"
    return f"{number / 1e9:.3g} B"
