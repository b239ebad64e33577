"""Rows of packed sequences, or of examples, to the batch that a model trains on; which examples share one."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

Batch = dict[str, torch.Tensor]
Collate = Callable[[Sequence[Mapping[str, Any]]], Batch]
# What the loss passes over (torch's `ignore_index`).
IGNORED = -100
# How far, as a share of its length, an example may stand from its place in the order of lengths: the same ones would
# meet in every epoch otherwise.
JITTER = 0.1


def collate(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """Stack rows of equal length into int64 tensors, `(batch, length)` each, and add `labels` and `attention_mask`.

    The mask of ones says that a sequence is one whole. Without any mask, transformers (5.23,
    `masking_utils.find_packed_sequence_indices`) takes every place where `position_ids` do not rise by one for the
    beginning of another sequence, and lets nothing attend across it: positions that skip would train each chunk alone.
    """
    batch = {
        column: torch.from_numpy(np.stack([np.asarray(row[column], dtype=np.int64) for row in rows]))
        for column in rows[0]
    }
    # A tensor of its own: context parallelism cuts each one in place.
    batch["labels"] = batch["input_ids"].clone()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


@dataclass(frozen=True)
class CollateExamples:
    """Rows of `prompt_ids` and `completion_ids` to a batch as long as the longest of them, padded behind.

    What is not learned has the label -100: padding always, the prompt unless `learn_prompts`.
    """

    padding: int
    learn_prompts: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """`input_ids`, `labels` and `attention_mask`, int64, `(batch, length)` each."""
        longest = max(example_lengths(rows))
        batch = {
            "input_ids": torch.full((len(rows), longest), self.padding),
            "labels": torch.full((len(rows), longest), IGNORED),
            "attention_mask": torch.zeros((len(rows), longest), dtype=torch.int64),
        }
        for index, row in enumerate(rows):
            ids = torch.from_numpy(np.concatenate([row["prompt_ids"], row["completion_ids"]]).astype(np.int64))
            first = 0 if self.learn_prompts else len(row["prompt_ids"])
            batch["input_ids"][index, : len(ids)] = ids
            batch["labels"][index, first : len(ids)] = ids[first:]
            batch["attention_mask"][index, : len(ids)] = 1
        return batch


def example_lengths(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many tokens each example has, prompt and completion."""
    return [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows]


class LengthGroups(Sampler[int]):
    """Indices of examples so that the `at_once` that are computed together have about the same length.

    The groups come in random order, another one in each epoch, so that a step of several groups has all lengths. Unlike
    transformers' `LengthGroupedSampler` (5.23), which draws from torch's global generator, the order follows from seed
    and epoch alone, so that a resumed run goes on in it; and few examples are grouped too.
    """

    def __init__(self, lengths: Sequence[int], at_once: int, seed: int) -> None:
        self.lengths, self.at_once, self.seed, self.epoch = lengths, at_once, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by whoever iterates, before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        rng = random.Random(f"{self.seed} {self.epoch}")
        near = [length * rng.uniform(1 - JITTER, 1 + JITTER) for length in self.lengths]
        order = sorted(range(len(near)), key=near.__getitem__)
        groups = [order[start : start + self.at_once] for start in range(0, len(order), self.at_once)]
        # One that is not full would shift those after it.
        rest = [groups.pop()] if len(groups[-1]) < self.at_once else []
        rng.shuffle(groups)
        return iter([index for group in [*groups, *rest] for index in group])
