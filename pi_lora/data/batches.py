"""The rows that train, made once and kept on disk, and batches of them."""

import hashlib
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers.trainer_pt_utils import LengthGroupedSampler

from pi_lora.data.chats import NO_CHATS_WARNING
from pi_lora.data.examples import NO_EXAMPLE
from pi_lora.data.packing import Row, Stream, training_rows
from pi_lora.data.sources import find_table, format_counts
from pi_lora.data.tokens import in_batches, padding_id, tokenizer_identity
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Training
from pi_lora.storage import cache_folder, make_once
from pi_lora.types import Json, Progress, silent

# Raise it with every change to how rows or recall documents are made: older caches are not taken for new ones.
FORMAT = 7
# The label that the loss ignores (torch's `ignore_index`).
IGNORED = -100

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingData:
    """Rows, the `tokens` of every row, messages to the user, and the token that fills batches."""

    rows: Dataset
    tokens: list[int]
    messages: list[str]
    padding: int

    @property
    def digest(self) -> str:
        """A SHA-256 of the number of rows and of about a thousand of them."""
        digest = hashlib.sha256(f"{len(self.rows)}".encode())
        for index in range(0, len(self.rows), max(1, len(self.rows) // 1000)):
            for values in self.rows[index].values():
                digest.update(values.numpy().tobytes())
        return digest.hexdigest()


def training_data(
    data: Data, training: Training, tokenizer: Any, original: int, target: int, progress: Progress = silent
) -> TrainingData:
    """Return the rows that the sections of a recipe ask for, from the cache where they were made before; otherwise
    `progress` is told the rows made and those needed, and the messages say what was cut or left out.

    Sequences have `target` (L') tokens, under PoSE (`positions: pose`) `sequence_tokens`, by default `original` (L);
    examples have at most `target` tokens. Raise DataError if a source cannot be read, or holds too little for the
    steps.
    """
    columns = ["input_ids"]
    columns += ["position_ids"] if data.positions == "pose" else []
    columns += ["loss_mask"] if data.has_chats or data.has_examples else []
    columns += ["lengths"] if data.has_chats else []
    number = 0 if data.has_examples else training.steps * training.global_batch_size
    length, counts = data.tokens_per_sequence(original, target), Counter[str]()
    streams = [Stream(find_table(source), data, tokenizer, length, counts) for source in data.source]
    made_from = {
        "format": FORMAT,
        "sources": [{**stream.source.model_dump(), **stream.table.identity} for stream in streams],
        "data": data.model_dump(exclude={"source"}),
        "tokenizer": tokenizer_identity(tokenizer),
        "template": tokenizer.chat_template,
        "windows": [original, target],
        "number": number,
    }

    def make() -> Iterator[Row]:
        for done, row in enumerate(training_rows(streams, original, target, number), 1):
            progress(done, number)
            yield row

    rows = cached(made_from, columns, make)
    tokens = pyarrow.compute.list_value_length(rows.data["input_ids"]).to_pylist()
    if data.has_examples:
        _check_epochs(len(rows), data, training)
    messages = [f"{len(rows):,} sequences of at most {max(tokens):,} tokens", *format_counts(counts)]
    if tokenizer.chat_template is not None and "loss_mask" not in columns:
        messages.append(NO_CHATS_WARNING)
    return TrainingData(rows, tokens, messages, padding_id(tokenizer))


def _check_epochs(examples: int, data: Data, training: Training) -> None:
    if not examples:
        raise DataError(f"data.source: {NO_EXAMPLE}")
    # As the Trainer counts: the last step of an epoch takes what is left.
    if training.steps > data.epochs * math.ceil(examples / training.global_batch_size):
        raise DataError(
            f"training.steps: {training.steps:,} of {training.global_batch_size} are more than {data.epochs} epochs of "
            f"{examples:,} examples; raise data.epochs, or lower it"
        )


def cached(made_from: Json, columns: Sequence[str], make: Callable[[], Iterator[Row]]) -> Dataset:
    """Return the `columns` of the rows made from `made_from`, tensors read from disk as they are needed: those in the
    cache, or those that `make` yields. Raise OSError if the cache cannot be written.
    """
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    file = cache_folder() / "sequences" / f"{key}.arrow"
    kinds = {name: pyarrow.list_(pyarrow.bool_() if name == "loss_mask" else pyarrow.int32()) for name in columns}
    schema = pyarrow.schema(kinds)

    def write(part: Path) -> None:
        with part.open("wb") as out:
            with pyarrow.ipc.new_file(out, schema) as writer:
                # Opening the file reads as many places of it as there are batches.
                for batch in in_batches(make()):
                    writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema))
            # A machine that loses power after the file was renamed must not leave zeros under its name.
            out.flush()
            os.fsync(out.fileno())

    return make_once(file, read_rows, write)


def read_rows(file: Path) -> Dataset | None:
    """Return the rows in a file, which begins and ends with an index of them; None if it is missing or damaged."""
    try:
        rows = pyarrow.ipc.open_file(pyarrow.memory_map(str(file))).read_all()
    except (pyarrow.ArrowException, OSError):
        return None
    # Without a fingerprint `datasets` (5.2) would make one from all the rows.
    return Dataset(rows, fingerprint=file.stem).with_format("torch")


def collate(rows: Sequence[Batch], padding: int = 0) -> Batch:
    """Return rows of `input_ids` as int64 tensors, `(sequences, length)` each, padded on the right to the longest, with
    `labels` and the `attention_mask`, in which each row is one sequence. Without it transformers (5.23,
    `find_packed_sequence_indices`) starts another wherever `position_ids` do not rise by one: PoSE would train each
    chunk alone. A row with several `lengths` holds as many sequences; tokens outside `loss_mask` have the label -100.
    """
    columns = defaultdict[str, list[torch.Tensor]](list)
    for row in rows:
        ids = row["input_ids"]
        labels = ids.where(row["loss_mask"], IGNORED) if "loss_mask" in row else ids
        whole = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        if "position_ids" in row:
            whole["position_ids"] = row["position_ids"]
        for name, values in whole.items():
            columns[name] += torch.split(values, row["lengths"].tolist() if "lengths" in row else len(ids))
    fill = {"input_ids": padding, "labels": IGNORED}
    return {name: pad_sequence(parts, True, fill.get(name, 0)) for name, parts in columns.items()}


class LengthGroups(LengthGroupedSampler):
    """Indices of rows so that those computed together have about the same length, in another order in each epoch.
    transformers' own order (5.23) depends on all that was drawn from torch's generator before, so that a resumed run
    would continue with another one. This one follows from the seed of torch, which is that of the run, and the epoch.
    """

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; the trainer calls it before each."""
        self.generator = torch.Generator().manual_seed(torch.initial_seed() + epoch)
