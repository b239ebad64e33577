"""Where a model's files are: a folder, the cache of the hub, or the package itself."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import EntryNotFoundError

from pi_lora.errors import ModelError, first_line

BUILTIN = "builtin:"
BUILTIN_FOLDER = Path(__file__).parents[1] / "builtin"
REMOTE_CODE = "runs Python code of its own; read that code, and if you trust it give --trust-remote-code"


def locate(name: str) -> str:
    """Return the folder or hub id that `name` means; raise ModelError if it is a folder that does not exist."""
    if name.startswith(BUILTIN):
        folders = {BUILTIN + path.name: path for path in sorted(BUILTIN_FOLDER.iterdir()) if path.is_dir()}
        if name not in folders:
            raise ModelError(f"{name}: no such built-in model; there is {', '.join(folders)}")
        return str(folders[name])
    if not is_local(name):
        return name
    if not (folder := Path(os.path.expanduser(name))).is_dir():
        raise ModelError(f"{name}: no such folder; give a model folder, a hub id or {BUILTIN}tiny")
    return str(folder)


def is_local(name: str) -> bool:
    """Whether a name cannot be a hub id, or is that of a file or folder."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def find_file(path: str, name: str, revision: str = "main") -> Path | None:
    """Return a file of the folder or hub id `path`, downloaded if necessary, or None if there is none."""
    if os.path.isdir(path):
        return file if (file := Path(path, name)).is_file() else None
    try:
        return Path(hf_hub_download(path, name, revision=revision))
    except EntryNotFoundError:  # or not in the cache, without a network
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {name} cannot be downloaded ({first_line(error)}); check name and network") from None


@contextmanager
def readable(name: str | Path, what: str) -> Iterator[None]:
    """Raise ModelError if transformers cannot read `what` of a model; its classes raise exceptions of any kind."""
    try:
        yield
    except Exception as error:
        cause = first_line(error)
        if HF_HUB_OFFLINE and not Path(name).exists():
            cause = "no folder here, nor in the cache of the hub, which HF_HUB_OFFLINE=1 forbids to ask"
        problem = f"has no {what} that can be read ({cause}); give a hub id, a model folder or {BUILTIN}tiny"
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            problem = REMOTE_CODE
        raise ModelError(f"{name}: {problem}") from None
