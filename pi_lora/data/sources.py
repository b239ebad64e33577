"""Sources of rows with named columns: local files, the hub, and Python's standard library; documents are one column."""

import functools
import hashlib
import itertools
import math
import os
import random
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from pi_lora.data.documents import (
    TABLE_SUFFIXES,
    Document,
    File,
    NamedJson,
    files_named,
    fingerprint,
    looks_local,
    rows_in,
    suffix_of,
)
from pi_lora.errors import DataError
from pi_lora.hub import commit_of, download_file, gated, hub_errors
from pi_lora.recipe.data import CHAT_COLUMNS, RECALL, Source
from pi_lora.recipe.evaluation import TextOptions
from pi_lora.types import Json

STDLIB = "builtin:stdlib"
BUILTIN_TEXTS = (STDLIB, RECALL)
# Tests and vendored packages are not in every installation; code page tables and the compiled help are hardly text.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
HELD_OUT_SHARE = 0.1
# The names before this one are of the validation split: with them the settings of the demo were chosen.
FIRST_OF_TEST = "e"
# The most rows that are counted for the share to hold out.
COUNTED_ROWS = 500
# A source of at most so many bytes is packed by a dry run, which takes seconds.
SMALL_BYTES = 2**23
# More than any tokenizer has in English or code, so that tokens are rather underestimated.
BYTES_PER_TOKEN = 5
# The column of chats in TRL.
MESSAGES = "messages"
# As many rows of a file as `datasets` (5.2) holds of a stream.
SHUFFLED_ROWS = 1000
# The loader of SCROLLS is a script, which `datasets` no longer runs. It reads `SPLIT.jsonl` out of `SUBSET.zip`.
SCROLLS = "tau/scrolls"


@dataclass(frozen=True)
class Table:
    """The rows of a source. `read` yields the texts in some columns of every row lazily, in a fixed order or shuffled
    by a seed. `identity` is JSON that changes with the rows, so that a cache of other rows is not used. `size` is the
    size of the local files in bytes. `texts` are the names of the files if every file is a text.
    """

    source: Source
    read: Callable[[Sequence[str], int | None], Iterator[NamedJson]]
    identity: Json
    size: int = 0
    texts: Sequence[str] = ()

    def documents(self, seed: int | None = None, held_out: bool = False) -> Iterator[Document]:
        """Yield the texts of the column that are not blank, in the order of `read`: the training part, or the part
        `held_out`. Raise DataError if there is none.
        """
        empty = True
        column = self.source.column
        for row_name, row in self.read([column], seed):
            part = self._part(row_name, row[column], held_out)
            document = Document(row_name, part)
            if document.text.strip():
                empty = False
                yield document
        if empty:
            raise DataError(f"{self.source.name}: holds no text; name a source with text, or change its hold_out")

    def _part(self, name: str, text: str, held_out: bool) -> str:
        """Return the part of a text that trains or is `held_out`. A single text is cut, and the end is held out. Of
        several files at least one is held out, chosen by name. Rows are held out by a digest of the text. So the split
        depends neither on the order of the documents nor on the machine.
        """
        share = self.source.hold_out
        if share is None:
            return text
        if len(self.texts) == 1:
            end = int(len(text) * (1 - share))
            # A long last line is cut.
            cut = text.rfind("\n", end // 2, end) + 1 or end
            return text[cut:] if held_out else text[:cut]
        is_held_out = name in self._files_held_out if self.texts else hash_to_unit(text) < share
        return text if is_held_out == held_out else ""

    @functools.cached_property
    def _files_held_out(self) -> set[str]:
        by_hash = sorted(self.texts, key=lambda name: hash_to_unit(Path(name).name))
        share = self.source.hold_out or 0
        number = max(1, round(share * len(by_hash)))
        return set(by_hash[:number])


def hash_to_unit(text: str) -> float:
    """Return a number in [0, 1) that follows from `text` alone, the same under every Python."""
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def texts(rows: Iterable[NamedJson], columns: Sequence[str]) -> Iterator[NamedJson]:
    """Yield the `columns` of rows, texts or chats; None becomes an empty value. A chat keeps its other columns.
    Raise DataError if a row lacks one of the `columns`.
    """
    for row_name, row in rows:
        if columns[0] == MESSAGES:
            row = _with_messages(row)
        values = row if columns[0] in CHAT_COLUMNS else {}
        for column in columns:
            kind = list if column in CHAT_COLUMNS else str
            if column not in row or not isinstance(row[column], kind | None):
                wanted = "list of messages" if kind is list else "text"
                held = f"holds {type(row[column]).__name__} and " if column in row else ""
                columns_held = ", ".join(row)
                raise DataError(
                    f"{row_name}: {held}has no {wanted} in column {column}; {_advice(row, columns)}; "
                    f"its columns: {columns_held}"
                )
            values[column] = row[column] or kind()
        yield row_name, values


def _with_messages(row: Json) -> Json:
    """Return a row whose `messages` join TRL's `prompt` and `completion`; only the completion is learned."""
    prompt: Any = row.get("prompt")
    completion: Any = row.get("completion")
    if MESSAGES in row or not (_is_chat(prompt) and _is_chat(completion)):
        return row
    given = [{**turn, "train": False} if turn.get("role") == "assistant" else turn for turn in prompt]
    return {**row, MESSAGES: [*given, *completion]}


def _is_chat(value: Any) -> bool:
    return _is_rows(value) and all("role" in turn or "from" in turn for turn in value)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _advice(row: Json, columns: Sequence[str]) -> str:
    """Return what to do with a row that lacks one of the `columns`, by the kinds of rows that TRL knows."""
    chats = [column for column, value in row.items() if _is_chat(value)]
    answer = "chosen" if "chosen" in row else "completion"
    if "input_ids" in row:
        return "rows of token ids are not read: name the texts that they were made from"
    if {"prompt", answer} <= row.keys() and not chats:
        return f'in a recipe, set data.template: "{{prompt}}" and data.completion: {answer}'
    if {"prompt", "completion"} <= set(chats):
        return f"name the column {MESSAGES}, which joins prompt and completion"
    if {"prompt", "chosen"} <= set(chats):
        return f"rename chosen to completion, and name the column {MESSAGES}, which joins both"
    if chats and row.keys().isdisjoint(CHAT_COLUMNS):
        chat = answer if answer in chats else chats[0]
        return f"rename {chat} to {MESSAGES}, and name that column"
    for column, value in row.items():
        if _is_rows(value) and not chats:
            return f"save the rows in {column} as a file of their own"
    if row.keys() == {"text"}:
        return f"name files of rows (.jsonl, .csv, .parquet) with {' and '.join(columns)}"
    if len(columns) > 1:
        return "name other columns by document and summary, or by template and completion"
    return (
        "name the column of texts, or of chats (messages or conversations), or leave the file out by a pattern such "
        "as *.txt"
    )


def format_counts(counts: Counter[str]) -> list[str]:
    """Return a line for every count above zero, such as the rows left out for a reason."""
    return [f"{label}: {number:,}" for label, number in counts.items() if number]


def shuffled(rows: Iterable[NamedJson], seed: int) -> Iterator[NamedJson]:
    """Shuffle a stream: keep a buffer of `SHUFFLED_ROWS` rows, and yield a random one of them for every further row."""
    rng = random.Random(seed)
    buffer: list[NamedJson] = []
    for row in rows:
        buffer.append(row)
        if len(buffer) > SHUFFLED_ROWS:
            index = rng.randrange(len(buffer))
            yield buffer.pop(index)
    rng.shuffle(buffer)
    yield from buffer


def read_files(files: Mapping[str, File], columns: Sequence[str], seed: int | None) -> Iterator[NamedJson]:
    """Yield the rows of named files, one file at a time; a seed shuffles the files, and the rows of each."""
    names = list(files)
    if seed is not None:
        random.Random(seed).shuffle(names)
    for name in names:
        rows = texts(rows_in(files[name], name, columns), columns)
        if seed is not None:
            rows = shuffled(rows, seed)
        yield from rows


def local_files(source: Source, files: Mapping[str, Path]) -> Table:
    """Return named files as a table."""
    holds_rows = any(suffix_of(file.name) in TABLE_SUFFIXES for file in files.values())
    return Table(
        source,
        read=functools.partial(read_files, files),
        identity={"sha256": fingerprint(files.values())},
        size=sum(file.stat().st_size for file in files.values()),
        texts=() if holds_rows else tuple(files),
    )


def split_of(relative_path: str) -> str:
    """Return the split of a file, train, validation or test, by its name alone, so the same under every Python."""
    if hash_to_unit(relative_path) >= HELD_OUT_SHARE:
        return "train"
    return "validation" if relative_path < FIRST_OF_TEST else "test"


def standard_library(source: Source) -> Table:
    """Return a split of Python's own sources, train, validation or test: a few megabytes at most."""
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, folders, names in os.walk(root):
        # Installed packages are often a hundred times as large; they are not walked.
        folders[:] = set(folders) - SKIPPED_FOLDERS
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    files = {}
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        if split_of(name) == source.split and path.stat().st_size:
            files[name] = path
    return local_files(source, files)


def hub_dataset(source: Source) -> Table:
    """Return a split of a hub data set. Rows are named by number if the order is fixed. A seed permutes all rows on
    disk. In a stream a seed permutes the files, and shuffles as many rows at a time as `shuffled`. Without the hub all
    rows are read from the cache.
    """
    name = source.name
    commit = _dataset_commit(name, source.revision)
    if constants.HF_HUB_OFFLINE:
        source = source.changed(streaming=False)
    dataset = _load_dataset(source, commit)

    def read(columns: Sequence[str], seed: int | None) -> Iterator[NamedJson]:
        rows = dataset if seed is None else dataset.shuffle(seed)
        with hub_errors(name, "dataset"):  # a stream asks for every file
            for number, row in enumerate(rows, 1):
                row_name = f"{name}:{number}" if seed is None else name
                yield from texts([(row_name, row)], columns)

    return Table(source, read, {"commit": commit})


def _load_dataset(source: Source, commit: str) -> Any:
    """Return a split of a hub data set at a commit, streamed or from the cache."""
    # `datasets` takes a second to import, and local text does without.
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    name = source.name
    with hub_errors(name, "dataset"):
        try:
            dataset = load_dataset(
                name,
                source.subset,
                split=source.split,
                revision=commit,
                streaming=source.streaming,
            )
        except DatasetNotFoundError as error:  # though the hub knows the commit
            raise DataError(gated(name, "dataset")) from error
    if not source.streaming:
        # Without the hub `datasets` (5.2) takes the commit that it downloaded last, in whose folder the rows are.
        last_commit = Path(dataset.cache_files[0]["filename"]).parent.name
        if last_commit != commit:
            raise DataError(
                f"{name}: revision {source.revision} is not on disk, but {last_commit} is, the last download; "
                "go online, or name that commit as the revision of the source"
            )
    return dataset


@functools.cache
def _dataset_commit(name: str, revision: str) -> str:
    """Return the commit of a data set: the same for all checks, trainings and measurements of a process."""
    return commit_of(name, revision, "dataset")


def hub_file(source: Source, file: str, member: str = "") -> Table:
    """Return one file of a data set on the hub, or a `member` of a zip archive, without running a script of the data
    set. Rows are named by their path on the hub.
    """
    commit = _dataset_commit(source.name, source.revision)
    path = download_file(source.name, file, commit, "dataset")
    if path is None:
        raise DataError(f"{source.name}: has no file {file}; check subset and revision")
    name = f"{source.name}/{member or file}"
    opened = zipfile.Path(path, member) if member else path
    read = functools.partial(read_files, {name: opened})
    return Table(source, read, {"commit": commit})


def find_table(source: Source) -> Table:
    """Return the rows of `source`; of recall documents, the standard library, whose lines they have in a recipe without
    other text. Raise DataError if they cannot be found.
    """
    name = source.name
    if name in BUILTIN_TEXTS:
        return standard_library(source)
    if name.startswith("builtin:"):
        raise DataError(f"{name}: no such built-in text; choose from {', '.join(BUILTIN_TEXTS)}")
    if name == SCROLLS:
        archive = f"{source.subset}.zip"
        member = f"{source.subset}/{source.split}.jsonl"
        return hub_file(source, archive, member)
    if not looks_local(name):
        return hub_dataset(source)
    files = {str(file): file for file in files_named(name)}
    return local_files(source, files)


def streamed(source: Source) -> Source:
    """Return a source whose first rows are read without the others, but for a part of a split such as `train[:50%]`,
    which `datasets` (5.2) cannot stream.
    """
    return source.changed(streaming=source.streaming or "[" not in source.split)


def with_size(table: Table, columns: Sequence[str]) -> Table:
    """Return a table whose size is known, on this machine or because the hub has few rows; of others the first
    `COUNTED_ROWS` rows are read at most.
    """
    if looks_local(table.source.name):
        return table
    size = 0
    for number, (_, row) in enumerate(table.read(columns, None)):
        size += len(str(row))
        if number == COUNTED_ROWS or size > SMALL_BYTES:
            return table
    return replace(table, size=size)


def share_to_hold_out(source: Source, target: int) -> float | None:
    """Return the share of `source` to hold out for windows of `target` tokens (L'): about four windows and ten
    documents, between a fiftieth and a fifth, and a hundredth of `COUNTED_ROWS` or more on the hub; none for text that
    is built in. Of few rows it is enough for one of them.
    """
    if source.name in BUILTIN_TEXTS:
        return None
    table = find_table(streamed(source))
    hashes: list[float] = []
    documents = len(table.texts)
    if not documents:
        rows = itertools.islice(table.read([source.column], None), COUNTED_ROWS)
        hashes = [hash_to_unit(row[source.column]) for _, row in rows]
        documents = len(hashes)
    if not looks_local(source.name) and documents == COUNTED_ROWS:
        return 0.01
    # The size of a data set on the hub is not known.
    four_windows = 16 * target / table.size if table.size else 0
    ten_documents = 10 / documents if documents > 1 else 0
    share = round(min(0.2, max(0.02, four_windows, ten_documents)), 2)
    if len(set(hashes)) > 1 and min(hashes) >= share:
        share = math.ceil(100 * min(hashes)) / 100
    return share


FOR_TRAINING = f"{RECALL}: is for training; measure recall with `pi-lora eval passkey` or `pi-lora eval ruler`"
# The keys that a source of text and `evaluation.perplexity` share.
HELD_OUT_KEYS = {"column", "subset", "split", "hold_out"}
# Repository, commit and file. PG-19 has all 100 books of the test split; `deepmind/pg19` itself needs a script.
PINNED = {
    "pg19": (
        Source(name="emozilla/pg19-test", revision="c5e39bf32e33f9111323aa68d7d9000d22722035"),
        "data/test-00000-of-00001-29a571947c0b5ccc.parquet",
    ),
    "proof-pile": (
        Source(name="hoskinson-center/proof-pile", revision="490b980249446f2f3bd2df3a8cf085d0f2de240a"),
        "test/proofpile_test.jsonl.gz",
    ),
}


def held_out_text(source: Source) -> Json:
    """Return the keys of `evaluation.perplexity` that measure the text that `source` holds out."""
    return source.model_dump(include=HELD_OUT_KEYS) | {"data": source.name}


def texts_of(source: Source) -> set[Any]:
    """Return the files of a source, none if they are gone; of other sources the data set, subset and each split, whole
    if a part of it is named: `train` and `test` of `train[:50%]+test`.
    """
    if source.name in BUILTIN_TEXTS or not looks_local(source.name):
        splits = [part.partition("[")[0].strip() for part in source.split.split("+")]
        return {(source.name, source.subset, split) for split in splits}
    with suppress(DataError):
        return {file.resolve() for file in files_named(source.name)}
    return set()


def trains_on(sources: Iterable[Source], measured: Source) -> bool:
    """Whether texts of `measured` are in these sources of a training, other than texts that are held out in both."""
    texts = texts_of(measured)
    for source in sources:
        trained = texts_of(source)
        # Rows are held out by their text, which is another in another column.
        is_same = trained == texts and source.column == measured.column
        are_held_out = is_same and source.hold_out is not None and source.hold_out == measured.hold_out
        if not are_held_out and not trained.isdisjoint(texts):
            return True
    return False


def held_out_share(sources: Iterable[Source], measured: Source) -> float | None:
    """Return the share of the texts of `measured` that these sources of a training hold out."""
    texts = texts_of(measured)
    shares = []
    for source in sources:
        if source.hold_out and source.column == measured.column and texts_of(source) == texts:
            shares.append(source.hold_out)
    return max(shares, default=None)


def evaluation_documents(options: TextOptions) -> Iterator[Document]:
    """Return the documents to measure on, read lazily in a fixed order. `builtin:stdlib` and the hub give the documents
    of the split; a name in `PINNED` gives that file. With `hold_out`, only documents held out from training are read.
    Raise DataError if there are none, or while reading.
    """
    name = options.data or STDLIB
    if name == RECALL:
        raise DataError(FOR_TRAINING)
    if name in PINNED:
        source, file = PINNED[name]
        return hub_file(source, file).documents()
    source = Source(name=name, **options.model_dump(include=HELD_OUT_KEYS))
    # The first documents of a large data set are measured without downloading all of it, and its other splits.
    takes_first = isinstance(options.documents, int) and options.seed is None
    if takes_first or options.hold_out is not None:
        source = streamed(source)
    return find_table(source).documents(held_out=True)
