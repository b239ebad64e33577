"""The machine of a measurement."""

import datetime
import importlib.metadata
import os
import platform
from typing import Any

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")


def machine() -> dict[str, Any]:
    """Processor, cores, GPU, versions of what computes, and the day."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = [f"{library} {importlib.metadata.version(library)}" for library in LIBRARIES]
    return {
        "processor": torch.cpu.get_capabilities().get("cpu_name") or platform.processor(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "versions": ", ".join(versions),
        "date": datetime.date.today().isoformat(),
    }
