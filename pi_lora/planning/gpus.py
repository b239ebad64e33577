"""The devices that can be planned for, with memory and peak FLOP/s."""

import re
from dataclasses import dataclass, replace

from pi_lora.errors import PiLoraError
from pi_lora.models.host import host_memory
from pi_lora.recipe.schema import Recipe

CPU = "cpu"
MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A device with its memory in bytes and, if known, its dense peak in FLOP/s.

    The peak is for bfloat16 with float32 accumulation, for float16 on a GPU without bfloat16, and for float32 on a CPU
    without fast bfloat16. That of this machine's CPU is measured.
    `host` is the memory of the host in bytes, known for the device of this machine only.
    """

    name: str
    memory: int
    peak: float | None
    bfloat16: bool = True
    host: int | None = None


# Names, memory in MiB, and peaks. Memory is what nvidia-smi reports; peaks are from NVIDIA's data sheets, half of a
# figure with sparsity, and of GeForce and RTX cards from the architecture whitepapers (Ampere GA102, Ada, RTX
# Blackwell).
DEVICES = (
    ("T4", 15360, 65e12),
    ("A10G", 23028, 70e12),
    ("L4", 23034, 121e12),
    ("4090", 24564, 165.2e12),
    ("3090", 24576, 71e12),
    ("5090", 32607, 209.5e12),
    ("A100-40", 40960, 312e12),
    ("L40S", 46068, 362e12),
    ("A6000", 49140, 154.8e12),
    ("6000-Ada", 49140, 364.2e12),
    ("H100", 81559, 989.4e12),  # SXM
    ("H100-PCIe", 81559, 756e12),
    ("A100-80", 81920, 312e12),
    ("H200", 143771, 989.4e12),  # SXM
    ("B200", 183359, 2250e12),  # one of the eight of an HGX
    # A modest machine instead of this one, so that a plan is the same everywhere: 16 GiB, two cores at 3 GHz with 64
    # float32 operations per cycle (AVX-512).
    (CPU, 16384, 0.384e12),
)
WITHOUT_BFLOAT16 = ("T4", CPU)
GPUS = {name: Gpu(name, memory * MIB, peak, name not in WITHOUT_BFLOAT16) for name, memory, peak in DEVICES}


def find_gpu(name: str, where: str = "--gpu") -> Gpu:
    """Return the device of that name, in any case, also as its maker writes it, or a device with that memory in GB
    (10^9 bytes). Raise PiLoraError for any other name; `where` is the option or key that the error mentions.

    >>> find_gpu("NVIDIA RTX 4090").name, find_gpu("a100 80GB").name, find_gpu("48GB").memory
    ('4090', 'A100-80', 48000000000)
    """
    short = re.sub(r"^(nvidia |geforce |rtx )+|gb$", "", name.lower()).replace(" ", "-")
    for known, gpu in GPUS.items():
        if short == known.lower():
            return gpu
    if size := re.fullmatch(r"([1-9]\d{0,3}) ?GB", name, re.IGNORECASE):
        return Gpu(f"{size[1]}GB", int(size[1]) * 10**9, None)
    raise PiLoraError(f"{where}: {name}: unknown device; name one of {', '.join(GPUS)}, or its memory, as 48GB")


def gpu_of_device(device_name: str, memory: int) -> Gpu:
    """Return the device that torch calls `device_name`, with `memory` bytes. It is a device of the table if the memory
    agrees within 5 %. Otherwise the name is the memory in GB, which a recipe accepts too.

    >>> gpu_of_device("NVIDIA A100-SXM4-80GB", 85_100_000_000).name, gpu_of_device("AMD X", 48_200_000_000).name
    ('A100-80', '48GB')
    """
    matches = []
    for gpu in GPUS.values():
        same_name = all(part in device_name for part in gpu.name.split("-"))
        # Slower GPUs of the same name, as in laptops, have other sizes.
        if same_name and abs(gpu.memory / memory - 1) < 0.05:
            matches.append(gpu)
    unknown = Gpu(f"{memory // 10**9}GB", memory, None)
    # The longest name: an H100 PCIe also matches the H100.
    return max(matches, key=lambda gpu: len(gpu.name), default=unknown)


def device_here() -> Gpu:
    """Return this machine's GPU, or the CPU with the memory that this process may use and the measured speed."""
    import torch

    from pi_lora.models.device import has_fast_bfloat16, processor_peak

    host = host_memory()[0]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        here = gpu_of_device(gpu.name, gpu.total_memory)
    else:
        here = replace(GPUS[CPU], memory=host, peak=processor_peak())
    return replace(here, bfloat16=has_fast_bfloat16(), host=host)


def device_for(recipe: Recipe, option: str | None = None) -> Gpu:
    """Return the device of `--gpu`, else that of `hardware.gpu`, else that of this machine."""
    if option:
        return find_gpu(option)
    if recipe.hardware.gpu:
        return find_gpu(recipe.hardware.gpu, "hardware.gpu")
    return device_here()
