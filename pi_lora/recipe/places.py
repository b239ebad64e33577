"""Where files go that no recipe names."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$PI_LORA_CACHE`, or `pi-lora` in the user's cache folder (`$XDG_CACHE_HOME`, by default `~/.cache`).

    It may be deleted whenever nothing runs: what is missing is made again.
    """
    if own := os.environ.get("PI_LORA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pi-lora"
