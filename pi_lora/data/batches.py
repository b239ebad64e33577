"""The rows that train, made once and kept on disk, and batches of them."""

import hashlib
import itertools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import torch
from datasets import Dataset
from filelock import FileLock
from torch.nn.utils.rnn import pad_sequence

from pi_lora.data.chats import NO_CHATS_WARNING
from pi_lora.data.documents import unread_documents
from pi_lora.data.examples import NO_EXAMPLE, Task
from pi_lora.data.packing import Row, Stream, say_unpacked, shortfalls, training_rows
from pi_lora.data.sources import Table, find_table, format_counts, streamed, with_size
from pi_lora.data.tokens import in_batches, padding_id, tokenizer_identity
from pi_lora.errors import DataError, ModelError
from pi_lora.recipe.data import Data
from pi_lora.recipe.schema import Training
from pi_lora.storage import cache_folder, digest_of, read_json, write_json
from pi_lora.types import Json, Progress, silent

# Raise it with every change to how rows or recall documents are made: older caches are not taken for new ones.
FORMAT = 14
# The label that the loss ignores (torch's `ignore_index`).
IGNORED = -100

Batch = dict[str, Any]


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
        number = len(self.rows)
        digest = hashlib.sha256(f"{number}".encode())
        step = max(1, number // 1000)
        for index in range(0, number, step):
            for values in self.rows[index].values():
                digest.update(values.numpy().tobytes())
        return digest.hexdigest()


def training_data(
    data: Data,
    training: Training,
    tokenizer: Any,
    original: int,
    target: int,
    progress: Progress = silent,
) -> TrainingData:
    """Return the rows that a recipe trains on, from the cache if they are there. Otherwise `progress` is told the
    numbers of rows made and needed, and the messages count rows cut or left out.

    Sequences have `target` (L') tokens, under PoSE (`positions: pose`) `sequence_tokens`, by default `original` (L).
    Examples have at most `target` tokens. Raise DataError if a source cannot be read or holds too little text for the
    steps.
    """
    columns = _columns(data)
    number = 0 if data.has_examples else training.steps * training.global_batch_size
    length = data.tokens_per_sequence(original, target)
    counts = Counter[str]()
    tables = [find_table(source) for source in data.source]
    streams = _streams(tables, data, tokenizer, length, counts)
    made_from = {
        "format": FORMAT,
        "sources": [table.source.model_dump() | table.identity for table in tables],
        "data": data.model_dump(exclude={"source"}),
        "tokenizer": tokenizer_identity(tokenizer),
        "template": tokenizer.chat_template,
        "windows": [original, target],
        "number": number,
    }

    def make() -> Iterator[Row]:
        for done, row in enumerate(training_rows(streams, original, target, number), 1):
            progress(done, number, "")
            yield row

    rows = cached(made_from, columns, make, counts)
    tokens = pyarrow.compute.list_value_length(rows.data["input_ids"]).to_pylist()
    if data.has_examples:
        _check_epochs(len(rows), data, training)
    longest = max(tokens)
    messages = [f"{len(rows):,} sequences of at most {longest:,} tokens"]
    messages += format_counts(counts)
    messages += filter(None, (unread_documents(source.name) for source in data.source))
    if tokenizer.chat_template is not None and "loss_mask" not in columns:
        messages.append(NO_CHATS_WARNING)
    return TrainingData(rows, tokens, messages, padding_id(tokenizer))


def packing_problems(data: Data, training: Training, tokenizer: Any, original: int, target: int) -> list[str]:
    """Return the errors that `training_data` raises. What takes more than seconds to tokenize is only read; large
    sources on the hub are not.
    """
    try:
        tables = [find_table(streamed(source)) for source in data.source]
        columns = Task(data).columns if data.has_examples else ()
        tables = [with_size(table, columns or [table.source.column]) for table in tables]
        streams = _streams(tables, data, tokenizer, data.tokens_per_sequence(original, target), Counter())
        if not data.has_examples:
            number = training.steps * training.global_batch_size
            return [str(problem) for problem in shortfalls(streams, original, number)]
        if all(stream.is_small() for stream in streams):
            examples = sum(1 for _ in training_rows(streams, original, target, 0))
            _check_epochs(examples, data, training)
            return []
        for stream in streams:
            say_unpacked(stream, "enough examples that fit")
        if all(table.size for table in tables):
            _check_epochs(sum(stream.read_rows() for stream in streams), data, training)
    except DataError as problem:
        return [str(problem)]
    return []


def _streams(tables: Sequence[Table], data: Data, tokenizer: Any, length: int, counts: Counter[str]) -> list[Stream]:
    texts = [table for table in tables if table.source.has_text]
    return [
        Stream(table=table, data=data, tokenizer=tokenizer, length=length, counts=counts, texts=texts)
        for table in tables
    ]


def _columns(data: Data) -> list[str]:
    is_needed = {
        "input_ids": True,
        "position_ids": data.positions == "pose",
        "loss_mask": data.has_chats or data.has_examples,
        "lengths": data.has_chats or data.keep_short or data.packing == "isolated",
    }
    return [column for column in is_needed if is_needed[column]]


def _check_epochs(examples: int, data: Data, training: Training) -> None:
    if not examples:
        raise DataError(f"data.source: {NO_EXAMPLE}")
    # As the Trainer counts: the last step of an epoch takes what is left.
    batch_size = training.global_batch_size
    steps_per_epoch = math.ceil(examples / batch_size)
    if training.steps > data.epochs * steps_per_epoch:
        raise DataError(
            f"training.steps: {training.steps:,} of {batch_size} are more than {data.epochs} epochs of "
            f"{examples:,} examples; raise data.epochs, or lower it"
        )


def cached(made_from: Json, columns: Sequence[str], make: Callable[[], Iterator[Row]], counts: Counter[str]) -> Dataset:
    """Return the `columns` of the cached rows for `made_from`; if there are none, cache the rows that `make` yields,
    and the `counts` of rows that were cut or left out. With cached rows the counts are filled in.

    Tensors are read from disk on use. Raise OSError if the cache cannot be written.
    """
    file = cache_folder() / "sequences" / f"{digest_of(made_from)}.arrow"
    counts_file = file.with_suffix(".json")
    rows = read_rows(file)
    if rows is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            # Another process may have made them meanwhile.
            if read_rows(file) is None:
                part = file.with_suffix(".partial")
                try:
                    _write_rows(part, columns, make())
                    write_json(counts_file, counts)
                    part.replace(file)
                finally:
                    part.unlink(missing_ok=True)
        rows = read_rows(file)
        assert rows is not None, f"{file}: cannot be read back"
    if not counts:
        with suppress(ModelError):  # of a cache of an older version, or damaged
            counts.update(read_json(counts_file, dict[str, int], "prepare again"))
    return rows


def _write_rows(file: Path, columns: Sequence[str], rows: Iterator[Row]) -> None:
    types = dict.fromkeys(columns, pyarrow.list_(pyarrow.int32()))
    if "loss_mask" in types:
        types["loss_mask"] = pyarrow.list_(pyarrow.bool_())
    schema = pyarrow.schema(types)
    with file.open("wb") as out:
        with pyarrow.ipc.new_file(out, schema) as writer:
            # Opening the file takes a read for every batch in it.
            for batch in in_batches(rows):
                writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema))
        # A machine that loses power after the file was renamed must not leave zeros under its name.
        out.flush()
        os.fsync(out.fileno())


def read_rows(file: Path) -> Dataset | None:
    """Return the rows in an Arrow file; None if the file is missing or damaged."""
    try:
        mapped = pyarrow.memory_map(str(file))
        rows = pyarrow.ipc.open_file(mapped).read_all()
    except (pyarrow.ArrowException, OSError):
        return None
    # Without a fingerprint `datasets` (5.2) would make one from all the rows.
    return Dataset(rows, fingerprint=file.stem).with_format("torch")


def collate(rows: Sequence[Batch], padding: int = 0, *, isolates: bool = False) -> Batch:
    """Return a batch of int64 tensors of shape `(sequences, length)`. A row with several `lengths` holds as many
    sequences. Tokens outside `loss_mask` have the label -100.

    If the model `isolates` sequences, those of different lengths are packed in one row, and otherwise padded on the
    right to the longest. The `attention_mask` marks every token of a sequence. Without it transformers (5.23,
    `find_packed_sequence_indices`) starts a sequence wherever `position_ids` do not rise by one. PoSE would then train
    every chunk alone.
    """
    columns = defaultdict[str, list[torch.Tensor]](list)
    for row in rows:
        ids = row["input_ids"]
        tensors = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        if "loss_mask" in row:
            tensors["labels"] = ids.where(row["loss_mask"], IGNORED)
        if "position_ids" in row:
            tensors["position_ids"] = row["position_ids"]
        lengths = [len(ids)]
        if "lengths" in row:
            lengths = row["lengths"].tolist()
        for name, tensor in tensors.items():
            columns[name] += torch.split(tensor, lengths)
    if isolates and len(set(map(len, columns["input_ids"]))) > 1:
        return _packed(columns)
    padding_values = {"input_ids": padding, "labels": IGNORED}
    return {
        name: pad_sequence(sequences, batch_first=True, padding_value=padding_values.get(name, 0))
        for name, sequences in columns.items()
    }


def _packed(columns: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    """Return sequences in one row, with positions that restart, and the bounds of sequences by which FlashAttention
    and the blockwise kernel isolate them.
    """
    lengths = [len(ids) for ids in columns["input_ids"]]
    positions = [torch.arange(length) for length in lengths]
    whole = {"position_ids": positions, **columns}
    batch: dict[str, Any] = {name: torch.cat(sequences)[None] for name, sequences in whole.items()}
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    # No sequence predicts the first token of the next.
    batch["labels"][:, bounds[:-1]] = IGNORED
    longest = max(lengths)
    return {
        **batch,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
