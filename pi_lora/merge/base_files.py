"""The files that hold a base model's weights, local or from the hub."""

import json
from pathlib import Path

from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from pi_lora.errors import ModelError
from pi_lora.merge.shards import StoredTensor, read_header
from pi_lora.model import BaseModel


def base_shards(base: BaseModel) -> list[list[StoredTensor]]:
    """What each file of `base` holds, in the order of its data; nothing but headers is read.

    Raises:
        ModelError: a file is missing or damaged, the index names what is not there, or there is only pickle.
    """
    index = find_file(base, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        single = find_file(base, SAFE_WEIGHTS_NAME)
        if single is None:
            raise ModelError(_no_weights(base))
        return [list(read_header(single).values())]
    placed = _read_index(index)
    return [_shard(base, file, placed) for file in sorted(set(placed.values()))]


def find_file(base: BaseModel, name: str) -> Path | None:
    """A file of `base`, downloaded if the base is on the hub; None where it has no such file."""
    try:
        found = cached_file(
            base.path,
            name,
            revision=base.revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"{base.name}: {name} cannot be had ({str(error).strip().splitlines()[0]})") from None
    return Path(found) if found else None


def _read_index(path: Path) -> dict[str, str]:
    """Which file holds which tensor."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(file) for name, file in index["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{path}: is no index of weights; download it again") from None


def _shard(base: BaseModel, file: str, placed: dict[str, str]) -> list[StoredTensor]:
    path = find_file(base, file)
    held = [name for name, where in placed.items() if where == file]
    if path is None:
        raise ModelError(f"{base.name}: {file}: is missing, and with it {held[0]} and others; download it again")
    found = read_header(path)
    if lacking := sorted(set(held) - set(found)):
        raise ModelError(f"{path}: lacks {', '.join(lacking)}, which the index places there; download it again")
    # What the index does not name is not read by transformers either.
    return [tensor for tensor in found.values() if placed.get(tensor.name) == file]


def _no_weights(base: BaseModel) -> str:
    pickled = next((name for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if find_file(base, name)), None)
    if pickled:
        return f"{base.name}: {pickled}: pickle can run code and is not read; save the base as safetensors"
    return f"{base.name}: holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; name a whole base"
