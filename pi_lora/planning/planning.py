"""Recipe to plan: memory of each device, tokens, operations and hours, from the shape of the model alone; and the
memory and arithmetic of the devices that can be planned for.
"""

import json
import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from pi_lora.errors import PiLoraError
from pi_lora.planning.evaluating import Measuring, afterwards, while_training
from pi_lora.planning.memory import GIB, DeviceMemory, memory, sequence_length
from pi_lora.planning.operations import Flops, flops_of_sequences
from pi_lora.planning.shape import Shape, trained_parameters
from pi_lora.recipe.schema import Recipe
from pi_lora.scaling.config import Config, Interpolation, check_extendable, check_reach, window_of
from pi_lora.types import NO_PERMISSIONS, Json, Permissions

# Config and shape of the hub models that the recipes name, so that these are planned offline and without torch.
CONFIGS = Path(__file__).parent / "configs"
BUILTIN_MODELS = Path(__file__).parents[1] / "builtin"
# Assumed: the share of a device's peak that a run reaches, recomputation counted as work. `full` lies between two
# published runs: Qwen3-8B at 1M tokens on 8 H100 (TRL's long-context guide: 380 s per step, 0.45) and LLaMA-7B at 64k
# on 8 A100 (EasyContext: 10,240 tokens/s, 0.50). None is published for LoRA or QLoRA at these lengths: LoRA adds small
# products and casts, QLoRA unpacks every weight three times. The CPU's share gives the demo's 760 steps the five
# minutes that they take on two cores.
ASSUMED_UTILIZATION = {"full": 0.45, "lora": 0.40, "qlora": 0.30, "cpu": 0.38}
# How far a measured peak may lie above the planned one; room is what is left beyond it.
MARGIN = 1.15
MIB = 2**20
CPU = "cpu"


@dataclass(frozen=True)
class Gpu:
    """A device by name: its memory in bytes; its dense peak in FLOP/s, if it is known, in bfloat16 with float32
    accumulation, or in float32 where it has no bfloat16; and where these are from.
    """

    name: str
    memory: int
    peak: float | None
    source: str
    bfloat16: bool = True


# Memory is what nvidia-smi reports. Ordered by memory: the first that holds a recipe is the smallest that does.
_KNOWN = (
    Gpu("T4", 15360 * MIB, 8.1e12, "NVIDIA T4 data sheet: float32, since Turing has no bfloat16", bfloat16=False),
    Gpu("A10G", 23028 * MIB, 70e12, "NVIDIA A10G data sheet"),
    Gpu("L4", 23034 * MIB, 121e12, "NVIDIA L4 data sheet: half of the figure with sparsity"),
    Gpu("4090", 24564 * MIB, 165.2e12, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    Gpu("3090", 24576 * MIB, 71e12, "NVIDIA Ampere GA102 whitepaper, appendix A"),
    Gpu("5090", 32607 * MIB, 209.5e12, "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A"),
    Gpu("A100-40", 40960 * MIB, 312e12, "NVIDIA A100 data sheet"),
    Gpu("L40S", 46068 * MIB, 362e12, "NVIDIA L40S data sheet: half of the figure with sparsity"),
    Gpu("A6000", 49140 * MIB, 154.8e12, "NVIDIA Ampere GA102 whitepaper, appendix C"),
    Gpu("6000-Ada", 49140 * MIB, 364.2e12, "NVIDIA Ada GPU architecture whitepaper, RTX 6000 Ada Generation"),
    Gpu("H100", 81559 * MIB, 989.4e12, "NVIDIA H100 SXM data sheet: half of the figure with sparsity"),
    Gpu("A100-80", 81920 * MIB, 312e12, "NVIDIA A100 data sheet"),
    Gpu("H200", 143771 * MIB, 989.4e12, "NVIDIA H200 SXM data sheet: half of the figure with sparsity"),
    Gpu("B200", 183359 * MIB, 2250e12, "NVIDIA HGX B200 data sheet: half of the figure with sparsity, of one of eight"),
    # A modest machine rather than this one, so that a plan says the same everywhere.
    Gpu(CPU, 16 * GIB, 0.384e12, "two cores at 3 GHz with 64 float32 operations a cycle (AVX-512)", bfloat16=False),
)
GPUS = {gpu.name: gpu for gpu in _KNOWN}


def find_gpu(name: str) -> Gpu:
    """Return a device of the table by its name in any case, or any by its memory in GB (10^9 bytes); raise PiLoraError
    if it is neither.

    >>> find_gpu("h100").name, find_gpu("48GB").memory
    ('H100', 48000000000)
    """
    for known, gpu in GPUS.items():
        if known.lower() == name.lower():
            return gpu
    if size := re.fullmatch(r"([1-9]\d{0,3}) ?GB", name, re.IGNORECASE):
        return Gpu(f"{size[1]} GB", int(size[1]) * 10**9, None, "its name")
    raise PiLoraError(f"--gpu: {name}: unknown device; name one of {', '.join(GPUS)}, or its memory, as 48GB")


def gpu_of_device(device_name: str, memory: int, bfloat16: bool = True) -> Gpu:
    """Return the device that torch calls `device_name` and gives `memory` bytes, with its peak if the table knows it; a
    slice of one (MIG) has its share of seven.

    >>> gpu_of_device("NVIDIA A100-SXM4-80GB", 85_100_000_000).peak
    312000000000000.0
    """
    words = set(re.findall(r"\w+", device_name))
    alike = [gpu for gpu in GPUS.values() if words >= set(gpu.name.split("-")) - {"40", "80"}]
    peak = alike[0].peak if alike and "Laptop" not in words else None
    if peak and (slices := re.search(r"MIG (\d)g", device_name)):
        peak *= int(slices[1]) / 7
    return Gpu(device_name, memory, peak, "torch.cuda.get_device_properties", bfloat16)


def device_here() -> Gpu:
    """Return this machine's accelerator with its memory, or its CPU with the machine's."""
    import psutil
    import torch  # takes seconds, and what is shipped is planned without

    from pi_lora.models.device import has_fast_bfloat16

    if not torch.cuda.is_available():
        return replace(GPUS[CPU], memory=psutil.virtual_memory().total, bfloat16=has_fast_bfloat16())
    gpu = torch.cuda.get_device_properties(0)
    # GPUs before Ampere emulate bfloat16.
    return gpu_of_device(gpu.name, gpu.total_memory, torch.cuda.is_bf16_supported(including_emulation=False))


@dataclass(frozen=True)
class Target:
    """The model that a plan is for: its shape, and its window before it is extended (L) in tokens."""

    shape: Shape
    original: int


@dataclass(frozen=True)
class Plan:
    """What a recipe takes on one kind of device; memory is that of each device, `flops` those of the whole training.
    `measuring` is what it measures while it trains, and `afterwards` what of the finished run, on one device.
    """

    recipe: Recipe
    target: Target
    gpu: Gpu
    trained: int
    memory: DeviceMemory
    tokens_per_step: int
    flops: Flops
    measuring: Measuring | None
    afterwards: Measuring | None

    @property
    def peak(self) -> float:
        """Bytes that each device needs at most, to train or to measure while it trains."""
        return max(self.memory.peak, self.measuring.peak if self.measuring else 0)

    @property
    def fits(self) -> bool:
        """Whether each device has the memory."""
        return self.peak <= self.gpu.memory

    @property
    def roomy(self) -> bool:
        """Whether each device has the memory with `MARGIN` to spare."""
        return self.peak * MARGIN <= self.gpu.memory

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
        come on top.
        """
        return self._hours(sum(self.flops) / self.recipe.hardware.processes)

    def hours_of(self, measuring: Measuring) -> float | None:
        """Hours of what is measured, if the device's peak and the length of the documents are known."""
        return None if measuring.flops is None else self._hours(measuring.flops)

    def _hours(self, flops_of_a_device: float) -> float | None:
        return self.gpu.peak and flops_of_a_device / (self.gpu.peak * self.utilization) / 3600

    def as_json(self) -> Json:
        """Return the plan as `--json` writes it."""
        return {
            "gpu": self.gpu.name,
            "gpus": self.recipe.hardware.processes,
            "machines": self.recipe.hardware.machines,
            "bytes": dict(self.memory.components),
            "overhead_bytes": self.memory.overhead,
            "peak_bytes_per_gpu": self.memory.peak,
            "memory_bytes_per_gpu": self.gpu.memory,
            "host_bytes_per_gpu": self.memory.host,
            "host_bytes_to_load": self.memory.loading,
            "fits": self.fits,
            "parameters": self.target.shape.parameters,
            "trained_parameters": self.trained,
            "tokens_per_step": self.tokens_per_step,
            "tokens": self.tokens,
            "steps": self.recipe.training.steps,
            "flops": self.flops._asdict(),
            "assumed_utilization": self.utilization,
            "hours": self.hours,
            "measuring": self._as_json(self.measuring),
            "afterwards": self._as_json(self.afterwards),
        }

    def _as_json(self, measuring: Measuring | None) -> Json | None:
        if measuring is None:
            return None
        bytes_ = {"peak_bytes_per_gpu": measuring.peak, "shared_prefix_bytes": measuring.prefix}
        return {**bytes_, "times": measuring.times, "hours": self.hours_of(measuring)}


def target_of(recipe: Recipe, permissions: Permissions = NO_PERMISSIONS) -> Target:
    """Find the model of `recipe`, build it on the meta device, and check that it can be extended as the recipe says."""
    config, shape = find_shape(recipe.model.name, recipe.model.revision, permissions)
    if recipe.scaling == "keep":
        check_reach(recipe.model.name, config, recipe.context.target)
        return Target(shape, window_of(config))
    original = recipe.context.original or window_of(config)
    check_extendable(config, Interpolation(recipe.scaling, original, recipe.context.target))
    return Target(shape, original)


@cache
def find_shape(name: str, revision: str = "main", permissions: Permissions = NO_PERMISSIONS) -> tuple[Config, Shape]:
    """Return the config and shape of a model: a shipped one, a folder, or else a hub id."""
    shipped = shipped_config(name)
    # Another revision than the main one may have another shape.
    if revision == "main" and (shipped / "shape.json").is_file() and not os.path.isdir(name):
        config, shape = ((shipped / file).read_text(encoding="utf-8") for file in ("config.json", "shape.json"))
        return json.loads(config), TypeAdapter(Shape).validate_json(shape)
    # Imported here: torch and transformers take seconds, and what is shipped does without.
    from pi_lora.models.model import find
    from pi_lora.planning.counting import shape_of

    base = find(name, permissions=permissions, revision=revision)
    return base.base_config, shape_of(base.skeleton)


def shipped_config(name: str) -> Path:
    """Return the folder where the config and shape of a hub or built-in model are shipped, if they are."""
    if name.startswith("builtin:"):
        return BUILTIN_MODELS / name.removeprefix("builtin:")
    return CONFIGS / name.replace("/", "--")


def plan_recipe(recipe: Recipe, target: Target, gpu: Gpu | None = None) -> Plan:
    """Plan `recipe` on `gpu`, or on the smallest device of the table that fits it and has bfloat16 (the CPU without
    GPUs).
    """
    if gpu is None:
        on_gpus = recipe.hardware.gpus is not None
        devices = [each for each in GPUS.values() if (each.bfloat16 and on_gpus) or (each.name == CPU and not on_gpus)]
        plans = [plan_recipe(recipe, target, each) for each in devices]
        return next((plan for plan in plans if plan.fits), plans[-1])
    on_cpu = gpu.name == CPU
    if on_cpu and recipe.hardware.gpus is not None:
        raise PiLoraError("--gpu: cpu: the recipe asks for hardware.gpus; name a GPU, or set hardware.gpus=null")
    shape, training, tokens = target.shape, recipe.training, sequence_length(recipe, target.original)
    sequences = training.steps * training.global_batch_size
    needed = memory(shape, recipe, target.original, on_cpu, gpu.bfloat16)
    window = target.original if recipe.scaling == "keep" else recipe.context.target
    return Plan(
        recipe=recipe,
        target=target,
        gpu=gpu,
        trained=trained_parameters(shape, recipe.tuning),
        memory=needed,
        tokens_per_step=training.global_batch_size * tokens,
        flops=flops_of_sequences(shape, recipe.tuning, tokens, training.activation_checkpointing, sequences),
        measuring=while_training(shape, recipe, window, needed, on_cpu),
        afterwards=afterwards(shape, recipe, target.original, window, on_cpu),
    )
