"""What a run was made from, known by content: a path or a name may mean other weights tomorrow, or from elsewhere."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from pi_lora.errors import ModelError
from pi_lora.models.stored import read_index, read_tensors
from pi_lora.types import Permissions
from pi_lora.writing import read_json

RUN_FILE = "run.json"
# Of each tensor its first, middle and last bytes are read: other weights differ everywhere.
SAMPLE_BYTES = 4096


class Origin(BaseModel, frozen=True, strict=True):
    """What a run was made from: the place or hub commit of its base, digests of its weights, tokenizer and data."""

    place: str | None = None
    commit: str | None = None
    weights: str
    tokenizer: str | None = None
    data: str | None = None


class _Run(BaseModel, strict=True):
    origin: Origin | None = None


def read_origin(run: Path) -> Origin | None:
    """Return what a run was made from, or None if it does not say, as those of former versions and other tools."""
    file = run / RUN_FILE
    return read_json(file, _Run, "correct it or remove it").origin if file.is_file() else None


def check_resumed(output: Path, staging: Path, now: Origin, permissions: Permissions) -> None:
    """Raise ModelError if an interrupted run in `staging` began with another base, tokenizer or data than `now`."""
    before = None if permissions.changed else read_origin(staging)
    names = ("weights", "tokenizer", "data")
    if before and (changed := [name for name in names if getattr(before, name) != getattr(now, name)]):
        what = f"{' and '.join(changed)} are others than those that the interrupted run began with"
        raise ModelError(f"{output}: {what}; bring them back, start a new run, or go on with --allow-changed")


def weights_digest(find_file: Callable[[str], Path | None]) -> str:
    """Return a SHA-256 of the names, types, shapes and sampled bytes of all tensors, however they share files;
    `find_file` gives the file of a name.
    """
    index = find_file(SAFE_WEIGHTS_INDEX_NAME)
    files = map(find_file, sorted({*read_index(index).values()}) if index else [SAFE_WEIGHTS_NAME])
    found = dict(tensor for file in files if file for tensor in _tensors(file))
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()


def _tensors(file: Path) -> list[tuple[str, list[object]]]:
    """Return each tensor's name with its type, shape and a digest of sampled bytes."""
    start_of_data, entries = read_tensors(file)
    found: list[tuple[str, list[object]]] = []
    with file.open("rb", buffering=0) as stream:
        for name, entry in entries.items():
            first, last = (start_of_data + offset for offset in entry.data_offsets)
            digest = hashlib.sha256()
            for start in sorted({first, max(first, (first + last) // 2), max(first, last - SAMPLE_BYTES)}):
                stream.seek(start)
                digest.update(stream.read(min(SAMPLE_BYTES, last - start)))
            found.append((name, [entry.dtype, entry.shape, digest.hexdigest()]))
    return found
