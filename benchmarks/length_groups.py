"""Tokens trained per second: batches of examples of similar lengths, beside shuffled ones, in one run.

    python benchmarks/length_groups.py REPORTS [--rounds 3] [--at-once 4]

REPORTS holds rows with the columns `report` and `summary`. Examples keep the proportions of the reports' lengths, once
of whole reports and once of reports cut to 60,000 characters, about the paper's 15000 tokens; the longest fills 1024
tokens of the built-in model, of which all weights train. Both ways pad to the longest of a batch. Rounds take turns,
and the median counts; padding does not count as a trained token. JSON goes to benchmarks/results/.
"""

import argparse
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from record import seconds_of, write_run

import pi_lora
from pi_lora.data.batches import CollateExamples, LengthGroups
from pi_lora.data.sources import find_table
from pi_lora.recipe.schema import Source

WINDOW, SUMMARY_TOKENS, CUT = 1024, 40, 60_000
WAYS = ("shuffled", "grouped")

Example = Mapping[str, list[int]]


def example_length(example: Example) -> int:
    return len(example["prompt_ids"]) + len(example["completion_ids"])


def examples_of(texts: Sequence[tuple[str, str]], tokenizer: Any, cut: int | None) -> list[Example]:
    """Examples whose documents are in proportion to the reports after `cut` characters."""
    lengths = [len(report[:cut]) for report, _ in texts]
    room, examples = WINDOW - SUMMARY_TOKENS, []
    for (report, summary), length in zip(texts, lengths, strict=True):
        prompt, completion = tokenizer([report[: 8 * room], summary], add_special_tokens=False)["input_ids"]
        number = round(room * length / max(lengths))
        examples.append({"prompt_ids": prompt[:number], "completion_ids": completion[:SUMMARY_TOKENS]})
    return examples


def batches(examples: list[Example], way: str, at_once: int) -> list[dict[str, torch.Tensor]]:
    """Each example once, in batches of similar lengths or shuffled."""
    order = list(LengthGroups(list(map(example_length, examples)), at_once, seed=0))
    if way == "shuffled":
        random.Random(0).shuffle(order)
    rows = [examples[index] for index in order]
    collate = CollateExamples(0)
    return [collate(rows[start : start + at_once]) for start in range(0, len(rows), at_once)]


def train(model: Any, made: list[dict[str, torch.Tensor]]) -> None:
    """An optimizer step per batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for batch in made:
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def measured(model: Any, examples: list[Example], rounds: int, at_once: int) -> dict[str, Any]:
    """Tokens per second of both ways, in turns, and the share of computed tokens that is not padding."""
    made = {way: batches(examples, way, at_once) for way in WAYS}
    lengths = list(map(example_length, examples))
    train(model, made["grouped"])  # warms up
    seconds = [{way: seconds_of(lambda way=way: train(model, made[way])) for way in WAYS} for _ in range(rounds)]
    speeds = [{way: round(sum(lengths) / each[way], 1) for way in WAYS} for each in seconds]
    computed = {way: sum(batch["input_ids"].numel() for batch in made[way]) for way in WAYS}
    return {
        "examples": len(examples),
        "shortest": min(lengths),
        "longest": max(lengths),
        "mean": round(statistics.fmean(lengths)),
        "tokens_per_second": {way: statistics.median(each[way] for each in speeds) for way in WAYS},
        "no_padding": {way: round(sum(lengths) / computed[way], 3) for way in WAYS},
        "rounds": speeds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", help="a .jsonl, .parquet or .csv file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args()
    rows = find_table(Source(name=options.reports)).read(["report", "summary"], None)
    texts = [(row["report"], row["summary"]) for _, row in rows]
    loaded = pi_lora.load("builtin:tiny", pi_lora.Extension(target=WINDOW))
    loaded.model.train()
    lengths = {}
    for name, cut in {"whole reports": None, f"cut to {CUT:,} characters": CUT}.items():
        examples = examples_of(texts, loaded.tokenizer, cut)
        lengths[name] = measured(loaded.model, examples, options.rounds, options.at_once)
        print(name, json.dumps(lengths[name]), flush=True)
    write_run("length_groups", {"at_once": options.at_once, "lengths": lengths})


if __name__ == "__main__":
    main()
