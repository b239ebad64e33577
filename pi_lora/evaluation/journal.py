"""What a measurement has found so far, so that an interrupted one continues where it stopped."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import BaseModel

from pi_lora.data.documents import fingerprint
from pi_lora.distributed import from_all, is_leader, share_of, wait_for_all
from pi_lora.errors import Interrupted
from pi_lora.evaluation.forward import described, is_sharded
from pi_lora.models.machine import versions
from pi_lora.models.model import Model
from pi_lora.recipe.places import cache_folder
from pi_lora.types import Json, Progress, silent

R = TypeVar("R", bound=BaseModel)
# Files of a model's folder that reports write, and that change no number.
WRITTEN_BY_REPORTS = (".md", ".html", ".png")


class Journal:
    """Results by name, in a folder named after what decides them, one file per process, a line as soon as a result is
    known; what was cut off is measured again. Without a folder, or if it cannot be written, nothing is kept.
    If `shared`, the processes of this run measure together, each its share; else this process measures all.
    """

    def __init__(self, folder: Path | None = None, shared: bool = False) -> None:
        self.folder, self.shared = folder, shared
        self.results: dict[str, Any] = {}
        for file in sorted(folder.glob("*.jsonl")) if folder else ():
            for line in file.read_bytes().splitlines():
                with suppress(ValueError):
                    name, result = json.loads(line)
                    self.results[name] = result

    def measure(
        self, kind: type[R], names: Sequence[str], measure: Callable[[str], R], progress: Progress = silent
    ) -> dict[str, R]:
        """Return the results of `names`: each process measures what is left of its share, and all return the same.
        `progress` is told after each.
        """
        own = share_of(names) if self.shared else names
        for done, name in enumerate(own, 1):
            if name not in self.results:
                self._keep(name, measure(name).model_dump())
                progress(done, len(own))
        mine = [(name, self.results[name]) for name in own]
        every = dict(from_all(mine) if self.shared else mine)
        return {name: kind.model_validate(every[name]) for name in names}

    def _keep(self, name: str, result: Any) -> None:
        self.results[name] = result
        if self.folder is None:
            return
        with suppress(OSError):  # a full disk ends no measurement
            self.folder.mkdir(parents=True, exist_ok=True)
            own = self.folder / f"{os.environ.get('RANK', '0')}-{os.getpid()}.jsonl"
            with own.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, result]) + "\n")


@dataclass
class Session:
    """How models are measured: `progress` is told of it, `say` is told what a user should know. If `shared`, the
    processes of this run measure together, and until the context ends without an error journals keep what was measured,
    for the same command to go on from. Ctrl-C becomes Interrupted.
    """

    progress: Progress = silent
    say: Callable[[str], object] = str
    shared: bool = False
    folders: list[Path] = field(default_factory=list)

    def journal(self, loaded: Model, decided_by: Mapping[str, Any]) -> Journal:
        """Return a journal of what is measured of a model; `decided_by` is JSON that, with the model, decides it. A
        model that trains has no files to tell it apart: nothing is kept of it. Every process measures all of a sharded
        model: its forward passes gather the weights from all processes, so all make the same ones.
        """
        if not self.shared or loaded.in_training:
            return Journal(shared=self.shared and not is_sharded(loaded.model))
        key = json.dumps({**decided_by, "model": identity_of(loaded)}, sort_keys=True)
        folder = cache_folder() / "evaluations" / hashlib.sha256(key.encode()).hexdigest()
        self.folders.append(folder)
        return Journal(folder, shared=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None and self.folders:
            wait_for_all()  # until here another process may read a journal
            for folder in self.folders if is_leader() else ():
                shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt) and any(folder.exists() for folder in self.folders):
            raise Interrupted("interrupted; what was measured is kept, the same command goes on from there") from None


def identity_of(loaded: Model) -> Json:
    """Return what decides the numbers that a model gives, as JSON: its files, config, dtype, kernel and versions."""
    adapter = [loaded.adapter] if loaded.adapter else []
    files = [file for folder in (*adapter, loaded.folder) for file in sorted(folder.iterdir()) if file.is_file()]
    return {
        **described(loaded),
        "files": fingerprint([file for file in files if file.suffix not in WRITTEN_BY_REPORTS]),
        "config": dict(loaded.config),
        "device": loaded.model.device.type,
        "versions": versions(),
    }
