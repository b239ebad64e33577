"""The machine of a measurement."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores, GPU, versions of what computes, and the day."""
    import torch

    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = ("torch", "transformers", "trl", "peft", "accelerate")
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in versions),
        "date": datetime.date.today().isoformat(),
    }
