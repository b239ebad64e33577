"""A digest of weights: a path or a name may mean others tomorrow, or elsewhere."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from pi_lora.models.stored import read_index, read_tensors

# Of each tensor its first, middle and last bytes are read: other weights differ everywhere.
SAMPLE_BYTES = 4096


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
