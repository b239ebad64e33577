"""Where a model's files are: a folder, the cache of the hub, or the package itself."""

import os
from pathlib import Path

from transformers.utils import cached_file

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
    folder = Path(os.path.expanduser(name))
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
    if looks_local and not folder.is_dir():
        raise ModelError(f"{name}: no such folder; give a model folder, a hub id or {BUILTIN}tiny")
    return str(folder) if looks_local else name


def find_file(path: str, name: str, revision: str = "main") -> Path | None:
    """Return a file of the folder or hub id `path`, downloaded if necessary, or None if there is none."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        file = cached_file(path, name, revision=revision, **quiet)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {name} cannot be read ({first_line(error)})") from None
    return Path(file) if file else None


def why_unreadable(error: Exception, otherwise: str) -> str:
    """Return what is wrong with a config or tokenizer that transformers did not read."""
    wants_code = isinstance(error, ValueError) and "trust_remote_code" in str(error)
    return REMOTE_CODE if wants_code else otherwise
