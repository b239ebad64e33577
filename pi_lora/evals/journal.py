"""What a measurement has found so far, so that an interrupted one goes on where it stopped."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Found = dict[str, Any]


class Journal:
    """Results by name, kept in a folder of `cache` that is named after all that decides them, a file a process.

    A line is written as soon as its result is known; one that was cut off is ignored, and measured again. `finish`
    removes the folder: a measurement that is whole is in its JSON.
    """

    def __init__(self, cache: Path, decided_by: Mapping[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(decided_by, sort_keys=True).encode()).hexdigest()
        self.folder = cache / "evaluations" / key
        self.found = self._read()
        self.file = self.folder / f"{os.environ.get('RANK', '0')}-{os.getpid()}.jsonl"

    def add(self, name: str, result: Any) -> None:
        """Keep a result, a JSON value."""
        self.found[name] = result
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "result": result}) + "\n")

    def finish(self) -> None:
        """Forget everything: the whole is known. Only when no process needs it any more."""
        for file in self.folder.glob("*.jsonl"):
            file.unlink(missing_ok=True)
        if self.folder.is_dir():
            self.folder.rmdir()

    def _read(self) -> Found:
        found: Found = {}
        for file in sorted(self.folder.glob("*.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):
                    entry = json.loads(line)
                    found[entry["name"]] = entry["result"]
        return found
