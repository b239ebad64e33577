"""Predictions in a file, a line each as they come, so that an interrupted measurement goes on."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pi_lora.errors import DataError

Line = dict[str, Any]


class Predictions:
    """`predictions.jsonl`: for each example its `id`, the `prediction`, the `reference`, and the key of what made it.

    The key is of all that decides a prediction, so that those of another model or setting are not taken for these. A
    line that a crash cut off is dropped. Several processes may append to one file, a line at a time.

    Raises:
        DataError: the file holds other predictions, or cannot be read or written.
    """

    def __init__(self, file: Path, decided_by: Mapping[str, Any]) -> None:
        self.file = file
        self.key = hashlib.sha256(json.dumps(decided_by, sort_keys=True).encode()).hexdigest()[:16]
        self.found = {line["id"]: line for line in self._lines()}

    def read_again(self) -> None:
        """Take note of what other processes have added."""
        self.found = {line["id"]: line for line in self._lines()}

    def add(self, name: str, prediction: str, reference: str, **more: Any) -> None:
        """Keep a prediction."""
        line = {"id": name, "prediction": prediction, "reference": reference, **more, "key": self.key}
        self.found[name] = line
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError as error:
            raise DataError(f"{self.file}: cannot be written ({error.strerror}); name another --predictions") from None

    def _lines(self) -> list[Line]:
        if not self.file.is_file():
            return []
        try:
            lines = self.file.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            found = [json.loads(line) for line in whole]
            keys = {line["key"] for line in found}
        except (OSError, ValueError, TypeError, KeyError):
            raise DataError(f"{self.file}: holds something else than predictions; name another --predictions") from None
        if keys - {self.key}:
            raise DataError(
                f"{self.file}: holds predictions of another model, data or setting; "
                "remove it, or name another --predictions"
            )
        if len(whole) < len(lines):
            self.file.write_text("".join(whole), encoding="utf-8")
        return found
