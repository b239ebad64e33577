"""Memory and arithmetic of the devices that recipes can be planned for."""

from dataclasses import dataclass

from pi_lora.errors import PiLoraError

GIB = 2**30
MIB = 2**20
CPU = "cpu"


@dataclass(frozen=True)
class Gpu:
    """A device by name: its memory in bytes, and its dense bfloat16 peak in FLOP/s (float32 accumulation)."""

    name: str
    memory: int
    peak: float
    source: str


# Memory is what nvidia-smi reports. Ordered by memory: the first that holds a recipe is the smallest that does.
_KNOWN = (
    Gpu("4090", 24564 * MIB, 165.2e12, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    Gpu("A100-40", 40960 * MIB, 312e12, "NVIDIA A100 data sheet"),
    Gpu("L40S", 46068 * MIB, 362e12, "NVIDIA L40S data sheet: half of the figure with sparsity"),
    Gpu("H100", 81559 * MIB, 989.4e12, "NVIDIA H100 SXM data sheet: half of the figure with sparsity"),
    Gpu("A100-80", 81920 * MIB, 312e12, "NVIDIA A100 data sheet"),
    Gpu("H200", 143771 * MIB, 989.4e12, "NVIDIA H200 SXM data sheet: half of the figure with sparsity"),
    # A modest machine rather than this one, so that a plan says the same everywhere.
    Gpu(CPU, 16 * GIB, 0.384e12, "two cores at 3 GHz with 64 float32 operations a cycle (AVX-512)"),
)
GPUS = {gpu.name: gpu for gpu in _KNOWN}


def find_gpu(name: str) -> Gpu:
    """Return a device of the table by its name in any case; raise PiLoraError if it is not there."""
    for known, gpu in GPUS.items():
        if known.lower() == name.lower():
            return gpu
    raise PiLoraError(f"--gpu: {name}: unknown device; name one of {', '.join(GPUS)}")


def gpu_of_device(device_name: str, memory: int) -> Gpu | None:
    """Return the device of the table that torch calls `device_name` and gives `memory` bytes, or None.

    >>> gpu_of_device("NVIDIA A100-SXM4-80GB", 85_100_000_000).name
    'A100-80'
    """
    alike = [gpu for gpu in GPUS.values() if gpu.name.split("-")[0] in device_name.replace("-", " ").split()]
    return min(alike, key=lambda gpu: abs(gpu.memory - memory), default=None)
