"""What a measurement has found so far, so that an interrupted one continues where it stopped."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError

from pi_lora.data.documents import fingerprint
from pi_lora.distributed import any_process, from_all, is_leader, share_of, wait_for_all
from pi_lora.errors import Interrupted
from pi_lora.evaluation.forward import is_sharded
from pi_lora.models.model import Model
from pi_lora.recipe.places import cache_folder
from pi_lora.types import Json

R = TypeVar("R", bound=BaseModel)
# The journals of what is measured but not written yet.
_WAITING: ContextVar[list[Path] | None] = ContextVar("waiting", default=None)


class Journal:
    """Results by name, in a folder named after what decides them, one file per process, a line as soon as a result is
    known; what was cut off or damaged is measured again. Without a folder, or if it cannot be written, nothing is kept.
    With a `model` the processes of this run measure together, each its part; without it this process measures all.
    """

    def __init__(self, folder: Path | None = None, model: Any = None) -> None:
        self.folder, self.model = folder, model
        self.found: dict[str, Any] = {}
        for file in sorted(folder.glob("*.jsonl")) if folder else ():
            with suppress(OSError):
                self.found |= _entries(file.read_bytes())

    def add(self, name: str, result: Any) -> None:
        """Keep a result, a JSON value."""
        self.found[name] = result
        if self.folder is None:
            return
        entry = [name, result]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            own = self.folder / f"{os.environ.get('RANK', '0')}-{os.getpid()}.jsonl"
            with own.open("a", encoding="utf-8") as file:
                file.write(json.dumps([*entry, _sum(entry)]) + "\n")
        except OSError as error:
            lost = f"cannot be written ({error.strerror}); an interrupted measurement will begin anew"
            print(f"{self.folder}: {lost}", file=sys.stderr)
            self.folder = None

    def left(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that this process has to measure."""
        return [name for name in self._share(names) if name not in self.found]

    def _share(self, names: Sequence[str]) -> Sequence[str]:
        return names if self.model is None else share_of(names)

    def measure(self, kind: type[R], names: Sequence[str], measure: Callable[[str], R]) -> dict[str, R]:
        """Return the results of `names`: each process measures what is left of its share, and all return the same."""
        for name in self.found.keys() & set(names):
            try:
                kind.model_validate(self.found[name])
            except ValidationError:  # of another version
                del self.found[name]
        with _as_many_passes(self.model):
            for name in self.left(names):
                self.add(name, measure(name).model_dump())
        mine = [(name, self.found[name]) for name in self._share(names)]
        found = dict(mine if self.model is None else from_all(mine))
        return {name: kind.model_validate(found[name]) for name in names}


@contextmanager
def _as_many_passes(model: Any) -> Iterator[None]:
    """Have all processes make as many forward passes of a sharded model, each of which gathers its weights from all:
    who is done repeats a pass over one token.
    """
    if not is_sharded(model):
        yield
        return

    def ask(*_: Any) -> None:
        any_process(True)

    # Before FSDP's own hook: all processes ask, and then gather.
    with model.register_forward_pre_hook(ask, prepend=True):
        yield
    one = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        while any(any_process(False)):
            model(input_ids=one, use_cache=False)


@contextmanager
def journaled(loaded: Model, decided_by: Mapping[str, Any], what: str, shared: bool = True) -> Iterator[Journal]:
    """Keep what is measured of a model until all is, `what` ("of 5 documents"), and in `kept_until_written` longer;
    Ctrl-C becomes Interrupted. Not kept is what is not `shared` between processes, and what a model that trains gives.
    """
    if not shared or loaded.in_training:
        yield Journal(model=loaded.model if shared else None)
        return
    key = json.dumps({**decided_by, "model": identity_of(loaded)}, sort_keys=True)
    folder = cache_folder() / "evaluations" / hashlib.sha256(key.encode()).hexdigest()
    journal = Journal(folder, loaded.model)
    try:
        yield journal
    except KeyboardInterrupt:
        done = f"interrupted after {len(journal.found)} {what}"
        raise Interrupted(f"{loaded.name}: {done}; the same command goes on from there") from None
    wait_for_all()  # Until here another process may read the journal.
    if (waiting := _WAITING.get()) is not None:
        waiting.append(folder)
    elif is_leader():
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def kept_until_written() -> Iterator[None]:
    """Remove the journals of what the body measures when it ends, and has written the results; on an error keep them,
    so that the same command does not measure again. Ctrl-C between two measurements becomes Interrupted.
    """
    token = _WAITING.set([])
    try:
        yield
        for folder in _WAITING.get() or () if is_leader() else ():
            shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt:
        if done := _WAITING.get():
            how = f"interrupted after {len(done)} measurements"
            raise Interrupted(f"{how}; the same command goes on from there") from None
        raise
    finally:
        _WAITING.reset(token)


def _entries(content: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the name and the result in each line that is whole."""
    for line in content.split(b"\n"):
        with suppress(ValueError, TypeError, RecursionError):
            name, result, sum_ = json.loads(line)
            if sum_ == _sum([name, result]):
                yield str(name), result


def _sum(entry: Sequence[Any]) -> int:
    return zlib.crc32(json.dumps(entry).encode())


def identity_of(loaded: Model) -> Json:
    """Return what decides the numbers that a model gives, as JSON: its files, config, dtype, kernel and versions."""
    adapter = [loaded.adapter] if loaded.adapter else []
    files = [file for folder in (*adapter, loaded.folder) for file in sorted(folder.iterdir()) if file.is_file()]
    return {
        "name": loaded.name,
        "files": fingerprint(files),
        "config": dict(loaded.config),
        "dtype": str(loaded.model.dtype),
        "kernel": loaded.model.config._attn_implementation,
        "device": loaded.model.device.type,
        "versions": [importlib.metadata.version(name) for name in ("pi-lora", "torch", "transformers")],
    }
