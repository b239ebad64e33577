"""Training batches from packed sequences or from examples, and which examples share one."""

import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

from pi_lora.data.chats import AT_STAKE
from pi_lora.data.examples import Account, training_examples
from pi_lora.data.packing import training_sequences
from pi_lora.data.tokens import padding_id
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Training
from pi_lora.types import Progress, silent

Batch = dict[str, torch.Tensor]
# The label that the loss ignores (torch's `ignore_index`).
IGNORED = -100
# How far, as a share of its length, an example moves in the order of lengths, so that each epoch has other batches.
JITTER = 0.1


def collate(rows: Sequence[Mapping[str, Any]], padding: int = 0) -> Batch:
    """Return rows of `input_ids` as int64 tensors, `(sequences, length)` each, padded on the right to the longest, with
    `labels` and the `attention_mask`, in which each row is one sequence. Without it transformers (5.23,
    `find_packed_sequence_indices`) starts another wherever `position_ids` do not rise by one: PoSE would train each
    chunk alone. A row with several `lengths` holds as many sequences; what is not `learned` has the label -100.
    """
    sequences: list[dict[str, Any]] = []
    for row in rows:
        ids = row["input_ids"]
        labels = np.where(row.get("learned", True), ids, IGNORED)
        columns = {"input_ids": ids, "labels": labels, "attention_mask": np.ones_like(ids)}
        if "position_ids" in row:
            columns["position_ids"] = row["position_ids"]
        ends = np.cumsum(row.get("lengths", len(ids)))[:-1]
        parts = (np.split(values, ends) for values in columns.values())
        sequences += [dict(zip(columns, values, strict=True)) for values in zip(*parts, strict=True)]
    fill = {"input_ids": padding, "labels": IGNORED}
    return {
        name: pad_sequence(
            [torch.from_numpy(np.array(sequence[name], np.int64)) for sequence in sequences],
            batch_first=True,
            padding_value=fill.get(name, 0),
        )
        for name in sequences[0]
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
        order = sorted(range(len(self)), key=lambda index: self.lengths[index] * rng.uniform(1 - JITTER, 1 + JITTER))
        groups = [order[start : start + self.at_once] for start in range(0, len(order), self.at_once)]
        rng.shuffle(groups)
        # A group that is not full comes last; it would shift those after it.
        return itertools.chain(*sorted(groups, key=len, reverse=True))


@dataclass(frozen=True)
class TrainingData:
    """Rows, the tokens of each or of every row, what to tell the user, and the token that fills batches."""

    rows: Dataset
    tokens: list[int] | int
    messages: list[str]
    padding: int

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> Batch:
        """Return a batch of rows."""
        return collate(rows, self.padding)

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
    padding = padding_id(tokenizer)
    if data.has_examples:
        examples, account = training_examples(data, tokenizer, target, progress)
        return TrainingData(examples, account.tokens, _example_messages(data, training, account), padding)
    number = training.steps * training.global_batch_size
    rows, messages = training_sequences(data, tokenizer, original, target, number, progress)
    length = data.tokens_per_sequence(original, target)
    messages.insert(0, f"{number * length:,} tokens at hand, as many as needed: {number:,} sequences of {length:,}")
    if not data.has_chats and tokenizer.chat_template is not None:
        messages.append(AT_STAKE)
    tokens = [int(sum(lengths)) for lengths in rows["lengths"]] if data.keep_short else length
    return TrainingData(rows, tokens, messages, padding)


def _example_messages(data: Data, training: Training, account: Account) -> list[str]:
    """Return what became of the rows, a line each; raise DataError if there are too few examples for the steps."""
    number, per_step = len(account.tokens), training.global_batch_size
    if number < per_step:
        raise DataError(f"training.global_batch_size: {per_step} is more than the {number:,} examples; lower it")
    # As the Trainer counts: the last step of an epoch takes what is left.
    epochs = training.steps / math.ceil(number / per_step)
    if epochs > data.epochs:
        how_often = f"{training.steps:,} of {per_step} are {epochs:.1f} epochs of {number:,} examples"
        raise DataError(f"training.steps: {how_often}; set data.epochs to {math.ceil(epochs)}, or lower it")
    lengths = f"{number:,} examples of {min(account.tokens):,} to {max(account.tokens):,} tokens"
    cut = f"{account.documents_cut:,} documents and {account.completions_cut:,} completions were cut"
    return [f"{lengths}; {cut}", *account.left_out]
