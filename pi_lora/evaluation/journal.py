"""What a measurement has found so far, so that an interrupted one continues where it stopped."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from transformers.utils import cached_file

from pi_lora.data.cache import cache_folder
from pi_lora.data.documents import fingerprint
from pi_lora.distributed import from_all, is_leader, share_of
from pi_lora.errors import Interrupted
from pi_lora.models.base import CONFIG_FILE
from pi_lora.models.load import LoadedModel
from pi_lora.types import Json

R = TypeVar("R", bound=BaseModel)


class Journal:
    """Results by name, in a folder of `cache` named after everything that decides them, one file per process. A line is
    written as soon as its result is known; one that was cut off is ignored, and measured again.
    """

    def __init__(self, cache: Path, decided_by: Mapping[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(decided_by, sort_keys=True).encode()).hexdigest()
        self.folder = cache / "evaluations" / key
        self.found: dict[str, Any] = {}
        for file in sorted(self.folder.glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):
                    entry = json.loads(line)
                    self.found[entry["name"]] = entry["result"]
        self.file = self.folder / f"{os.environ.get('RANK', '0')}-{os.getpid()}.jsonl"

    def add(self, name: str, result: Any) -> None:
        """Keep a result, a JSON value."""
        self.found[name] = result
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "result": result}) + "\n")

    def finish(self) -> None:
        """Remove all results; only once no process reads them any more."""
        for file in self.folder.glob("*.jsonl"):
            file.unlink(missing_ok=True)
        if self.folder.is_dir():
            self.folder.rmdir()


@contextmanager
def journaled(loaded: LoadedModel, decided_by: Mapping[str, Any], what: str) -> Iterator[Journal]:
    """Keep what is measured of a model until all is, `what` ("of 5 documents"); Ctrl-C becomes Interrupted."""
    journal = Journal(cache_folder(), {**decided_by, "model": identity_of(loaded)})
    try:
        yield journal
    except KeyboardInterrupt:
        done = f"{len(journal.found)} {what}"
        raise Interrupted(f"{loaded.name}: interrupted after {done}; the same command goes on from there") from None
    from_all([])  # Until here another process may read the journal.
    if is_leader():
        journal.finish()


def to_measure(names: Sequence[str], journal: Journal | None) -> list[str]:
    """Return those of `names` that this process measures: with a journal, what is left of its share, else all."""
    return list(names) if journal is None else [name for name in share_of(names) if name not in journal.found]


def measure_each(
    kind: type[R], names: Sequence[str], measure: Callable[[str], R], journal: Journal | None
) -> dict[str, R]:
    """Return the results of `names`; with a journal each process measures its share, and all return the same."""
    if journal is None:
        return {name: measure(name) for name in names}
    for name in to_measure(names, journal):
        journal.add(name, measure(name).model_dump())
    found = dict(from_all([(name, journal.found[name]) for name in share_of(names)]))
    return {name: kind.model_validate(found[name]) for name in names}


def identity_of(loaded: LoadedModel) -> Json:
    """Return what decides the numbers that a model gives, as JSON: its files, config, dtype, kernel and versions."""
    assert loaded.found is not None
    base, adapter = loaded.found.base, [loaded.found.adapter] if loaded.found.adapter else []
    # Of a model of the hub, the folder of its commit.
    own = Path(str(cached_file(base.path, CONFIG_FILE, revision=base.revision))).parent
    files = [file for folder in (*adapter, own) for file in sorted(folder.iterdir()) if file.is_file()]
    return {
        "name": loaded.name,
        "files": fingerprint(files),
        "config": dict(loaded.config),
        "dtype": str(loaded.model.dtype),
        "kernel": loaded.model.config._attn_implementation,
        "device": loaded.model.device.type,
        "versions": [importlib.metadata.version(name) for name in ("pi-lora", "torch", "transformers")],
    }
