"""What is kept of a merge beside the weights: `merge.json`, and the model card."""

import importlib.metadata
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pi_lora.card import CARD, merged_card
from pi_lora.merge.agreement import Check
from pi_lora.run_folder import LIBRARIES

MERGE_FILE = "merge.json"


@dataclass(frozen=True)
class Merge:
    """What was merged: `onto` the stored or the quantized base; `untied` where a tied head became its own tensor."""

    base: str
    run: str
    onto: str
    dtype: str
    scale: float
    window: int
    untied: bool


def write_merge(folder: Path, merge: Merge, check: Check | None) -> None:
    """Write `merge.json` and `README.md`; no `check` means that none was made.

    Raises:
        ModelError: a result that is kept in the run cannot be read.
    """
    made_with = {name: importlib.metadata.version(name) for name in LIBRARIES}
    facts = {**asdict(merge), "check": asdict(check) if check else None, "versions": made_with}
    (folder / MERGE_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    lines = check.lines() if check else []
    (folder / CARD).write_text(merged_card(Path(merge.run), folder, lines, _facts(merge)), encoding="utf-8")


def merge_lines(folder: Path) -> list[str]:
    """What a merged folder says of itself, for the terminal."""
    facts = json.loads((folder / MERGE_FILE).read_text(encoding="utf-8"))
    check = Check.from_json(facts["check"]) if facts["check"] else None
    untied = ["the head was tied to the embeddings, and they diverged: it is a tensor of its own now"]
    return [*(untied if facts["untied"] else []), *(check.lines() if check else ["not checked"])]


def _facts(merge: Merge) -> dict[str, str]:
    """What the card says of this merge beyond any other."""
    onto = {"added onto": "the base after the rounding to NF4 that it was tuned on"}
    untied = {"head": "was tied to the embeddings; they diverged, and are two tensors now"}
    return {**(onto if merge.onto == "quantized" else {}), **(untied if merge.untied else {})}
