"""What a measurement has found so far, so that an interrupted one goes on where it stopped."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from pi_lora.data.documents import fingerprint
from pi_lora.models.base import CONFIG_FILE
from pi_lora.models.load import LoadedModel
from pi_lora.scaling.config import Config, constant_longrope, full_attention_rope

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


def depends_on_length(config: Config) -> bool:
    """Whether a model computes the same tokens otherwise in a longer input: its frequencies follow the length."""
    rope = full_attention_rope(config)
    return rope.get("rope_type") in ("dynamic", "longrope") and constant_longrope(rope) is None


def identity_of(loaded: LoadedModel) -> dict[str, Any]:
    """What decides the numbers that a model gives, as JSON: its files, its config, dtype, kernel and versions."""
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
