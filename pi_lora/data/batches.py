"""Training batches from packed sequences or from examples, and which examples share one."""

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

from pi_lora.data.examples import training_examples
from pi_lora.data.packing import training_sequences
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Training
from pi_lora.types import Progress, silent

Batch = dict[str, torch.Tensor]
Collate = Callable[[Sequence[Mapping[str, Any]]], Batch]
# The label that the loss ignores (torch's `ignore_index`).
IGNORED = -100
# How far, as a share of its length, an example moves in the order of lengths, so that each epoch has other batches.
JITTER = 0.1


def collate(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """Stack rows of equal length into int64 tensors, `(batch, length)` each, with `labels` and an `attention_mask` of
    ones: each row is one sequence. Without it transformers (5.23, `find_packed_sequence_indices`) starts another
    wherever `position_ids` do not rise by one: PoSE would train each chunk alone.
    """
    batch = {column: torch.from_numpy(np.array([row[column] for row in rows], np.int64)) for column in rows[0]}
    # A tensor of its own: context parallelism cuts each one in place.
    batch["labels"] = batch["input_ids"].clone()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


@dataclass(frozen=True)
class CollateExamples:
    """Batch rows of `prompt_ids` and `completion_ids`, padded on the right to the longest of them. What is not learned
    has the label -100: padding always, the prompt unless `learn_prompts`.
    """

    padding: int
    learn_prompts: bool = False

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Return `input_ids`, `labels` and `attention_mask`, int64, `(batch, length)` each."""
        wholes = (np.concatenate([row["prompt_ids"], row["completion_ids"]]) for row in rows)
        ids = [torch.from_numpy(whole.astype(np.int64)) for whole in wholes]
        labels = pad_sequence(ids, batch_first=True, padding_value=IGNORED)
        for row, learned in zip(rows, labels, strict=True):
            learned[: 0 if self.learn_prompts else len(row["prompt_ids"])] = IGNORED
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.padding),
            "labels": labels,
            "attention_mask": pad_sequence(list(map(torch.ones_like, ids)), batch_first=True),
        }


class LengthGroups(Sampler[int]):
    """Indices of examples so that the `at_once` that are computed together have about the same length, in another order
    of groups in each epoch. Unlike that of transformers' `LengthGroupedSampler` (5.23), it follows from seed and epoch
    alone, so that a resumed run continues it; and few examples are grouped too.
    """

    def __init__(self, lengths: Sequence[int], at_once: int, seed: int) -> None:
        self.lengths, self.at_once, self.seed, self.epoch = lengths, at_once, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; the trainer calls it before each."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        rng = random.Random(f"{self.seed} {self.epoch}")
        near = [length * rng.uniform(1 - JITTER, 1 + JITTER) for length in self.lengths]
        order = sorted(range(len(near)), key=near.__getitem__)
        groups = [order[start : start + self.at_once] for start in range(0, len(order), self.at_once)]
        # A group that is not full comes last; it would shift those after it.
        rest = groups.pop() if len(groups[-1]) < self.at_once else []
        rng.shuffle(groups)
        return itertools.chain(*groups, rest)


@dataclass(frozen=True)
class TrainingData:
    """Rows, what makes a batch of them, the tokens of each or of every row, and what to tell the user."""

    rows: Dataset
    collate: Collate
    tokens: list[int] | int
    messages: list[str]

    @property
    def digest(self) -> str:
        """A SHA-256 of the number of rows and of about a thousand of them."""
        found = hashlib.sha256(f"{len(self.rows)}".encode())
        for index in range(0, len(self.rows), max(1, len(self.rows) // 1000)):
            for values in self.rows[index].values():
                found.update(values.tobytes())
        return found.hexdigest()

    def tokens_per_step(self, rows: int) -> int | None:
        """Return the tokens of a step of so many `rows`; None where they differ."""
        return self.tokens * rows if isinstance(self.tokens, int) else None

    def groups(self, at_once: int, seed: int) -> LengthGroups | None:
        """Return which rows are computed together, `at_once` at a time; None where all have one length."""
        return None if isinstance(self.tokens, int) else LengthGroups(self.tokens, at_once, seed)


def training_data(
    data: Data,
    training: Training,
    tokenizer: Any,
    original: int,
    target: int,
    progress: Progress = silent,
) -> TrainingData:
    """Return what the sections of a recipe ask for, from the cache where it was made before; examples have at most
    `target` (L') tokens. Raise DataError if a source cannot be read, or holds too little for the steps.
    """
    if data.has_examples:
        return _examples(data, training, tokenizer, target, progress)
    number = training.steps * training.global_batch_size
    rows = training_sequences(data, tokenizer, original, target, number, progress)
    length = len(rows[0]["input_ids"])
    message = f"{number * length:,} tokens at hand, as many as needed: {number:,} sequences of {length:,}"
    return TrainingData(rows, collate, length, [message])


def _examples(data: Data, training: Training, tokenizer: Any, window: int, progress: Progress) -> TrainingData:
    rows, account = training_examples(data, tokenizer, window, progress)
    number, per_step = len(rows), training.global_batch_size
    if number < per_step:
        raise DataError(f"training.global_batch_size: {per_step} is more than the {number:,} examples; lower it")
    # As the Trainer counts: the last step of an epoch takes what is left.
    epochs = training.steps / math.ceil(number / per_step)
    if epochs > data.epochs:
        how_often = f"{training.steps:,} of {per_step} are {epochs:.1f} epochs of {number:,} examples"
        raise DataError(f"training.steps: {how_often}; set data.epochs to {math.ceil(epochs)}, or lower it")
    tokens = list(map(sum, account.tokens))
    learned = sum(tokens) if data.loss == "all" else sum(completion for _, completion in account.tokens)
    message = (
        f"{number:,} examples of {min(tokens):,} to {max(tokens):,} tokens; {learned:,} of {sum(tokens):,} "
        f"tokens are learned; {account.documents_cut:,} documents and {account.completions_cut:,} completions were cut"
    )
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return TrainingData(rows, CollateExamples(padding, data.loss == "all"), tokens, [message, *account.left_out])
