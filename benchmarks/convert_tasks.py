"""Write BoolQ, PIQA and WinoGrande in the schema of lm-eval's tasks, for `pi-lora eval benchmarks --data TASK=FILE`.

    python benchmarks/convert_tasks.py DATA FOLDER

DATA holds boolq/dev.jsonl, piqa/valid.jsonl with valid-labels.lst, and winogrande/dev.jsonl, as their authors publish
them. BoolQ's answers become labels, PIQA's labels are put beside their questions, WinoGrande is as it was.
"""

import json
from pathlib import Path
from typing import Any

from record import parser_of

SOURCES = {"boolq": "dev.jsonl", "piqa": "valid.jsonl", "winogrande": "dev.jsonl"}


def examples(folder: Path, file: str) -> list[dict[str, Any]]:
    """Return the examples of a task in lm-eval's schema."""
    rows = [json.loads(line) for line in (folder / file).read_bytes().splitlines()]
    if folder.name == "boolq":
        labels = [row["answer"] for row in rows]
    elif folder.name == "piqa":
        labels = (folder / "valid-labels.lst").read_text(encoding="utf-8").split()
    else:
        return rows
    return [{**row, "label": int(label)} for row, label in zip(rows, labels, strict=True)]


def convert(data: Path, folder: Path) -> None:
    """Write a file for each task into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, file in SOURCES.items():
        lines = [json.dumps(row) + "\n" for row in examples(data / task, file)]
        (folder / f"{task}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    convert(**vars(parser.parse_args()))
