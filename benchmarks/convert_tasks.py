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


def read(data: Path, task: str) -> list[dict[str, Any]]:
    """Return the examples of a task in lm-eval's schema."""
    folder = data / task
    text = (folder / SOURCES[task]).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line]
    if task == "boolq":
        return [{**row, "label": int(row["answer"])} for row in rows]
    if task == "piqa":
        labels = (folder / "valid-labels.lst").read_text(encoding="utf-8").split()
        return [{**row, "label": int(label)} for row, label in zip(rows, labels, strict=True)]
    return rows


def convert(data: Path, folder: Path) -> dict[str, Path]:
    """Write a file for each task into a folder; return them by task."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {task: folder / f"{task}.jsonl" for task in SOURCES}
    for task, file in files.items():
        lines = [json.dumps(row) + "\n" for row in read(data, task)]
        file.write_text("".join(lines), encoding="utf-8")
    return files


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    converted = convert(**vars(parser.parse_args()))
    for task, file in converted.items():
        print(f"--data {task}={file}")
