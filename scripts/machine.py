"""The machine of a measurement."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")


def machine() -> dict[str, Any]:
    """Processor, cores, GPU, versions of what computes, and the day."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = [f"{library} {importlib.metadata.version(library)}" for library in LIBRARIES]
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "versions": ", ".join(versions),
        "date": datetime.date.today().isoformat(),
    }


def processor() -> str:
    """The model name that Linux gives the processor, or the name that Python knows."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                _, _, name = line.partition(":")
                return name.strip()
    return platform.processor()
