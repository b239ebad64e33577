"""Tokens trained per second: batches of similar lengths, beside all examples padded to the longest, in one run.

    python benchmarks/length_groups.py REPORTS [--rounds 3] [--at-once 4]

REPORTS holds rows with the columns `report` and `summary`. Examples keep the proportions of the reports' lengths, once
of whole reports and once of reports cut to 60,000 characters, about the paper's 15000 tokens; the longest fills 1024
tokens of the built-in model, of which all weights train. `padded` pads every example to the longest of all; `shuffled`
and `grouped` pad to the longest of the batch, the second with batches of similar lengths, as `pi-lora train` does. Each
trains one epoch of the same examples per round; rounds alternate, and the median counts. Padding does not count as a
trained token. JSON goes to benchmarks/results/.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pi_lora.data.batches import Batch, CollateExamples, LengthGroups
from pi_lora.data.sources import find_table
from pi_lora.models.model import Extension, Model, load
from pi_lora.recipe.schema import Source

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "length_groups.json"
WINDOW, SUMMARY_TOKENS, CUT = 1024, 40, 60_000

sys.path[:0] = [str(ROOT / "scripts")]

Rows = Sequence[Mapping[str, Any]]


def example_lengths(rows: Rows) -> list[int]:
    return [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows]


def rows_in_proportion(texts: Sequence[tuple[str, str]], loaded: Model, cut: int | None) -> Rows:
    """Return examples whose documents are in proportion to the reports after `cut` characters."""
    lengths = [min(len(report), cut or len(report)) for report, _ in texts]
    room = WINDOW - SUMMARY_TOKENS
    rows = []
    for (report, summary), length in zip(texts, lengths, strict=True):
        ids = loaded.tokenizer(report[: 8 * room], add_special_tokens=False)["input_ids"]
        written = loaded.tokenizer(summary, add_special_tokens=False)["input_ids"]
        number = round(room * length / max(lengths))
        rows.append({"prompt_ids": ids[:number], "completion_ids": written[:SUMMARY_TOKENS]})
    return rows


def batches(rows: Rows, how: str, at_once: int, padding: int) -> Iterator[Batch]:
    """Yield each example once; `how` says which share a batch and how far they are padded."""
    lengths = example_lengths(rows)
    order = list(LengthGroups(lengths, at_once, seed=0))
    if how != "grouped":
        random.Random(0).shuffle(order)
    collate = CollateExamples(padding)
    for start in range(0, len(order), at_once):
        batch = collate([rows[index] for index in order[start : start + at_once]])
        if how == "padded":
            fill = {"input_ids": padding, "labels": -100, "attention_mask": 0}
            missing = max(lengths) - batch["input_ids"].shape[1]
            batch = {
                name: torch.nn.functional.pad(each, (0, missing), value=fill[name]) for name, each in batch.items()
            }
        yield batch


def tokens_a_second(loaded: Model, rows: Rows, how: str, at_once: int) -> float:
    """Train one epoch with a forward, a backward and an optimizer step per batch, and return its tokens per second."""
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-6)
    started = time.perf_counter()
    for batch in batches(rows, how, at_once, loaded.tokenizer.eos_token_id):
        loaded.model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(example_lengths(rows)) / (time.perf_counter() - started)


def measured(loaded: Model, rows: Rows, rounds: int, at_once: int) -> dict[str, Any]:
    """Return tokens per second of every way, in turns, and the share of computed tokens that is not padding."""
    ways = ("padded", "shuffled", "grouped")
    tokens_a_second(loaded, rows, "grouped", at_once)  # warms up
    found = [{how: tokens_a_second(loaded, rows, how, at_once) for how in ways} for _ in range(rounds)]
    speed = {how: statistics.median(each[how] for each in found) for how in ways}
    tokens = sum(example_lengths(rows))
    computed = {how: sum(each["input_ids"].numel() for each in batches(rows, how, at_once, 0)) for how in ways}
    return {
        "examples": len(rows),
        "shortest": min(example_lengths(rows)),
        "longest": max(example_lengths(rows)),
        "mean": round(tokens / len(rows)),
        "tokens_per_second": {how: round(each, 1) for how, each in speed.items()},
        "no_padding": {how: round(tokens / each, 3) for how, each in computed.items()},
        "grouped_over_padded": round(speed["grouped"] / speed["padded"], 2),
        "rounds": [{how: round(each, 1) for how, each in one.items()} for one in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", help="a .jsonl, .parquet or .csv file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args()
    from machine import machine

    table = find_table(Source(name=options.reports))
    texts = [(row["report"], row["summary"]) for _, row in table.rows(["report", "summary"])]
    loaded = load("builtin:tiny", Extension(WINDOW))
    loaded.model.train()
    result: dict[str, Any] = {"machine": machine(), "at_once": options.at_once, "lengths": {}}
    for name, cut in {"whole reports": None, f"cut to {CUT:,} characters": CUT}.items():
        rows = rows_in_proportion(texts, loaded, cut)
        result["lengths"][name] = measured(loaded, rows, options.rounds, options.at_once)
        print(name, json.dumps(result["lengths"][name]), flush=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(RESULTS)


if __name__ == "__main__":
    main()
