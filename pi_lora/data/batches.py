"""The rows that train, made once and kept on disk, and batches of them."""

import hashlib
import itertools
import json
import math
import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import torch
from datasets import Dataset, Features, List, Value
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

from pi_lora.data.chats import AT_STAKE
from pi_lora.data.examples import no_example
from pi_lora.data.packing import Row, Stream, mixed
from pi_lora.data.sources import count_lines
from pi_lora.data.tokens import padding_id, tokenizer_identity
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Training
from pi_lora.types import Json, Progress, silent
from pi_lora.writing import cache_folder, make_once, write_json

# Raise it with every change to how rows or recall documents are made: older caches are not taken for new ones.
FORMAT = 6
ROWS_AT_ONCE = 32
ROWS, ABOUT = "rows.arrow", "about.json"
# The label that the loss ignores (torch's `ignore_index`).
IGNORED = -100
# How far, as a share of its length, an example moves in the order of lengths, so that each epoch has other batches.
JITTER = 0.1

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingData:
    """Rows, the `tokens` of every row, messages to the user, and the token that fills batches."""

    rows: Dataset
    tokens: list[int]
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

    def groups(self, at_once: int, seed: int) -> "LengthGroups | None":
        """Return which rows are computed together, `at_once` at a time; None where all have one length."""
        return LengthGroups(self.tokens, at_once, seed) if len(set(self.tokens)) > 1 else None


def training_data(
    data: Data, training: Training, tokenizer: Any, original: int, target: int, progress: Progress = silent
) -> TrainingData:
    """Return the rows that the sections of a recipe ask for, from the cache where they were made before; otherwise
    `progress` is told the tokens packed and those needed, or the number of examples.

    Sequences have `target` (L') tokens, under PoSE (`positions: skip`) `sequence_tokens`, by default `original` (L);
    examples have at most `target` tokens. Raise DataError if a source cannot be read, or holds too little for the
    steps.
    """
    number = 0 if data.has_examples else training.steps * training.global_batch_size
    rows, messages = _training_rows(data, tokenizer, original, target, number, progress)
    tokens = pyarrow.compute.list_value_length(rows.data["input_ids"]).to_pylist()
    first = f"{sum(tokens):,} tokens at hand, as many as needed: {number:,} sequences of {max(tokens):,}"
    if data.has_examples:
        _check_epochs(len(rows), data, training)
        first = f"{len(rows):,} examples of {min(tokens):,} to {max(tokens):,} tokens"
    elif tokenizer.chat_template is not None and not data.has_chats:
        messages.append(AT_STAKE)
    return TrainingData(rows, tokens, [first, *messages], padding_id(tokenizer))


def _check_epochs(examples: int, data: Data, training: Training) -> None:
    per_step = training.global_batch_size
    if examples < per_step:
        raise DataError(f"training.global_batch_size: {per_step} is more than the {examples:,} examples; lower it")
    # As the Trainer counts: the last step of an epoch takes what is left.
    epochs = training.steps / math.ceil(examples / per_step)
    if epochs > data.epochs:
        how_often = f"{training.steps:,} of {per_step} are {epochs:.1f} epochs of {examples:,} examples"
        raise DataError(f"training.steps: {how_often}; set data.epochs to {math.ceil(epochs)}, or lower it")


def _training_rows(
    data: Data, tokenizer: Any, original: int, target: int, number: int, progress: Progress
) -> tuple[Dataset, list[str]]:
    """Return `number` sequences, or all examples, and lines about what was cut or left out."""
    length = data.tokens_per_sequence(original, target)
    streams = [Stream(source, data, tokenizer, length) for source in data.source]
    unused = {"source", "epochs", "seed"} if data.has_examples else {"source", "sequence_tokens"}
    made_from = {
        "format": FORMAT,
        "sources": [{**stream.source.model_dump(), **stream.table.identity()} for stream in streams],
        "data": data.model_dump(exclude=unused),
        "tokenizer": tokenizer_identity(tokenizer),
        "template": tokenizer.chat_template,
        "length": length,
        "original": original,
        "target": target,
        "number": number,
    }
    columns = ["input_ids"]
    columns += ["position_ids"] if data.positions == "skip" else []
    columns += ["learned"] if data.has_chats or data.has_examples else []
    columns += ["lengths"] if data.has_chats else []

    def counts() -> Counter[str]:
        return sum((stream.counts for stream in streams), Counter())

    def make() -> Iterator[Row]:
        progress(0, number * length)
        examples = itertools.chain.from_iterable(stream.rows() for stream in streams)
        done = 0
        for row in examples if data.has_examples else mixed(streams, original, target, number):
            done += 1
            progress(done * (length if number else 1), number * length)
            yield {name: row[name] for name in columns}
        if not done:
            cause = f"data.completion_tokens: {data.completion_tokens} leave no room for a prompt"
            raise no_example("data.source", counts(), f"{cause}; lower it, or choose a longer context.target")

    return cached(made_from, columns, make, lambda: count_lines(counts()))


def cached(
    made_from: Json, columns: Sequence[str], make: Callable[[], Iterator[Row]], notes: Callable[[], list[str]] = list
) -> tuple[Dataset, list[str]]:
    """Return the rows made from `made_from`, NumPy arrays mapped into memory, and the notes on them: those in the
    cache, or the rows that `make` yields and `notes` after it. Raise DataError if the cache cannot be written.
    """
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    folder = cache_folder() / "sequences" / key
    features = Features({name: List(Value("bool" if name == "learned" else "int32")) for name in columns})

    def fill(part: Path) -> None:
        rows, number, schema = make(), 0, features.arrow_schema
        with (part / ROWS).open("wb") as out:
            with pyarrow.ipc.new_stream(out, schema) as writer:
                # A few rows are in memory at a time.
                while batch := list(itertools.islice(rows, ROWS_AT_ONCE)):
                    writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema))
                    number += len(batch)
            # A machine that loses power after the folder was renamed must not leave a file of zeros under its name.
            out.flush()
            os.fsync(out.fileno())
        write_json(part / ABOUT, {"made_from": made_from, "rows": number, "notes": notes()})

    make_once(folder, lambda: read_rows(folder, features) is not None, fill)
    found = read_rows(folder, features)
    assert found is not None, f"{folder}: cannot be read back"
    return found


def read_rows(folder: Path, features: Features) -> tuple[Dataset, list[str]] | None:
    """Return the rows in `folder` and the notes on them; None if they are missing, damaged, or have other columns."""
    try:
        rows, about = Dataset.from_file(str(folder / ROWS)), json.loads((folder / ABOUT).read_bytes())
    except (pyarrow.ArrowException, OSError, ValueError):
        return None
    is_whole = (len(rows), rows.features) == (about["rows"], features)
    return (rows.with_format("numpy"), about["notes"]) if is_whole else None


def collate(rows: Sequence[Mapping[str, Any]], padding: int = 0) -> Batch:
    """Return rows of `input_ids` as int64 tensors, `(sequences, length)` each, padded on the right to the longest, with
    `labels` and the `attention_mask`, in which each row is one sequence. Without it transformers (5.23,
    `find_packed_sequence_indices`) starts another wherever `position_ids` do not rise by one: PoSE would train each
    chunk alone. A row with several `lengths` holds as many sequences; what is not `learned` has the label -100.
    """
    columns = defaultdict[str, list[torch.Tensor]](list)
    for row in rows:
        ids = torch.tensor(row["input_ids"], dtype=torch.int64)
        learned = torch.tensor(row.get("learned", True))
        whole = {"input_ids": ids, "labels": ids.where(learned, IGNORED), "attention_mask": torch.ones_like(ids)}
        if "position_ids" in row:
            whole["position_ids"] = torch.tensor(row["position_ids"], dtype=torch.int64)
        lengths = [int(length) for length in row.get("lengths", [len(ids)])]
        for name, values in whole.items():
            columns[name] += torch.split(values, lengths)
    fill = {"input_ids": padding, "labels": IGNORED}
    return {name: pad_sequence(parts, True, fill.get(name, 0)) for name, parts in columns.items()}


@dataclass(eq=False)
class LengthGroups(Sampler[int]):
    """Indices of examples so that the `at_once` that are computed together have about the same length, in another order
    of groups in each epoch. Unlike that of transformers' `LengthGroupedSampler` (5.23), it follows from seed and epoch
    alone, so that a resumed run continues it; and few examples are grouped too.
    """

    lengths: Sequence[int]
    at_once: int
    seed: int
    epoch: int = 0

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
