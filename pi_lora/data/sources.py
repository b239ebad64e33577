"""Sources of rows with named columns: local files, the hub, and Python's standard library; documents are one column."""

import functools
import hashlib
import itertools
import os
import random
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download

from pi_lora.data.documents import (
    TABLE_SUFFIXES,
    Document,
    File,
    NamedJson,
    files_named,
    fingerprint,
    looks_local,
    rows_in,
)
from pi_lora.errors import DataError, first_line
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.recipe.schema import CHAT_COLUMNS, Source
from pi_lora.types import Json

STDLIB = "builtin:stdlib"
RECALL = "builtin:recall"
# Tests and vendored packages are not in every installation; code page tables and the compiled help are hardly text.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
HELD_OUT_SHARE = 0.1
# The names before this one are of the validation split: with them the settings of the demo were chosen.
FIRST_OF_TEST = "e"
# As many rows of a file as `datasets` (5.2) holds of a stream.
SHUFFLED_ROWS = 1000
# Its loader is a script, which `datasets` no longer runs; the script reads `SPLIT.jsonl` out of `SUBSET.zip`.
SCROLLS = "tau/scrolls"


@dataclass(frozen=True)
class Table:
    """The rows of a source. `read` yields the texts in some columns of every row as they are asked for, in a fixed
    order or in that of a seed. `identity` is JSON that changes with the rows: a cache made from them is stale then.
    `size` is the bytes of its files on this machine. `texts` are the names of the files if every file is a text.
    """

    source: Source
    read: Callable[[Sequence[str], int | None], Iterator[NamedJson]]
    identity: Json
    size: int = 0
    texts: Sequence[str] = ()

    def documents(self, seed: int | None = None, held_out: bool = False) -> Iterator[Document]:
        """Yield the texts of the column that are not blank, ordered as `read`: those that train, or those that are
        `held_out`. Raise DataError if there is none.
        """
        empty = True
        for where, row in self.read([self.source.column], seed):
            if (text := self._part(where, row[self.source.column], held_out)).strip():
                empty = False
                yield Document(where, text)
        if empty:
            raise DataError(f"{self.source.name}: holds no text; name a source with text, or change its hold_out")

    def _part(self, name: str, text: str, held_out: bool) -> str:
        """Return the part of a text that trains or is `held_out`. One text is cut, the end is held out. Of several
        files at least one is held out, chosen by their names; of rows those that a digest of the text chooses. So the
        division follows neither the order of the documents nor the machine.
        """
        share = self.source.hold_out
        if share is None:
            return text
        if len(self.texts) == 1:
            end = int(len(text) * (1 - share))
            cut = text.rfind("\n", 0, end) + 1 or end
            return text[cut:] if held_out else text[:cut]
        is_held_out = name in self._files_held_out if self.texts else hash_to_unit(text) < share
        return text if is_held_out == held_out else ""

    @functools.cached_property
    def _files_held_out(self) -> set[str]:
        by_hash = sorted(self.texts, key=lambda name: hash_to_unit(Path(name).name))
        return set(by_hash[: max(1, round((self.source.hold_out or 0) * len(by_hash)))])


def hash_to_unit(text: str) -> float:
    """Return a number in [0, 1) that follows from `text` alone, the same under every Python."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def texts(rows: Iterable[NamedJson], columns: Sequence[str]) -> Iterator[NamedJson]:
    """Yield `columns` of each row, texts or chats, None as an empty one; raise DataError where a row has none."""
    for where, row in rows:
        values = {}
        for column in columns:
            kind = list if column in CHAT_COLUMNS else str
            if column not in row or not isinstance(row[column], kind | None):
                wanted = "list of messages" if kind is list else "text"
                raise DataError(
                    f"{where}: has no {wanted} in column {column}; choose text, or chats named "
                    f"{' or '.join(CHAT_COLUMNS)}, from its columns: {', '.join(row)}"
                )
            values[column] = row[column] or kind()
        yield where, values


def format_counts(counts: Counter[str]) -> list[str]:
    """Return a line for everything that was counted, such as the reasons why rows were left out."""
    return [f"{what}: {number:,}" for what, number in counts.items() if number]


def shuffled(rows: Iterable[NamedJson], seed: int) -> Iterator[NamedJson]:
    """Shuffle a stream: hold some rows, and yield a random one of them for each that comes."""
    rng = random.Random(seed)
    held: list[NamedJson] = []
    for row in rows:
        held.append(row)
        if len(held) > SHUFFLED_ROWS:
            yield held.pop(rng.randrange(len(held)))
    rng.shuffle(held)
    yield from held


def read_files(files: Mapping[str, File], columns: Sequence[str], seed: int | None) -> Iterator[NamedJson]:
    """Yield the rows of named files, one file at a time; a seed shuffles the files, and the rows of each."""
    names = list(files)
    if seed is not None:
        random.Random(seed).shuffle(names)
    for name in names:
        rows = texts(rows_in(files[name], name, columns), columns)
        yield from rows if seed is None else shuffled(rows, seed)


def local_files(source: Source, files: Mapping[str, Path]) -> Table:
    """Return named files as a table."""
    size = sum(file.stat().st_size for file in files.values())
    holds_rows = any(file.name.lower().endswith(TABLE_SUFFIXES) for file in files.values())
    identity = {"sha256": fingerprint(files.values())}
    return Table(source, functools.partial(read_files, files), identity, size, () if holds_rows else [*files])


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
        # Installed packages, which are not entered, are often a hundred times as much.
        folders[:] = set(folders) - SKIPPED_FOLDERS
        paths += (Path(folder, name) for name in names if name.endswith(".py"))
    files = {
        name: path
        for path in sorted(paths)
        if split_of(name := path.relative_to(root).as_posix()) == source.split and path.stat().st_size
    }
    return local_files(source, files)


def hub_dataset(source: Source) -> Table:
    """Return a split of a hub data set. Rows are named by their number where the order is fixed. The seeded order
    permutes all rows on disk. In a stream it permutes the files, and shuffles as many rows at a time as `shuffled`.
    """
    # `datasets` takes a second to import, and local text does without.
    from datasets import load_dataset

    name, revision, streaming = source.name, source.revision, source.streaming
    with _hub_errors(name):
        if streaming:
            revision = str(HfApi().dataset_info(name, revision=revision).sha)
        dataset = load_dataset(name, source.subset, split=source.split, revision=revision, streaming=streaming)
    # In the cache of `datasets` a data set is in a folder with the name of its commit.
    commit = revision if streaming else Path(dataset.cache_files[0]["filename"]).parent.name

    def read(columns: Sequence[str], seed: int | None) -> Iterator[NamedJson]:
        for number, row in enumerate(dataset if seed is None else dataset.shuffle(seed), 1):
            yield from texts([(f"{name}:{number}" if seed is None else name, row)], columns)

    return Table(source, read, {"commit": commit})


def hub_file(source: Source, file: str, member: str = "") -> Table:
    """Return one file of a data set on the hub as it was uploaded, or a `member` of a zip archive, so that no script
    runs. Rows are named by their place on the hub.
    """
    with _hub_errors(f"{source.name}/{file}"):
        path = Path(hf_hub_download(source.name, file, repo_type="dataset", revision=source.revision))
    files = {f"{source.name}/{member or file}": zipfile.Path(path, member) if member else path}
    # In the cache of the hub a file is in a folder with the name of its commit.
    return Table(source, functools.partial(read_files, files), {"commit": path.parents[file.count("/")].name})


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # `datasets` raises a dozen kinds: not found, gated, offline, no such split
        raise DataError(
            f"{name}: is neither a file or folder nor a hub data set that can be read ({first_line(error)}); "
            "check its name, subset, split and revision, the network, or log in with `hf auth login`"
        ) from error


def find_table(source: Source) -> Table:
    """Return the rows that `source` names, of `builtin:recall` the text between its facts; raise DataError if they are
    not there.
    """
    name = source.name
    if name in (STDLIB, RECALL):
        return standard_library(source)
    if name.startswith("builtin:"):
        raise DataError(f"{name}: no such built-in text; choose {STDLIB} or {RECALL}")
    if name == SCROLLS:
        return hub_file(source, f"{source.subset}.zip", f"{source.subset}/{source.split}.jsonl")
    if not looks_local(name):
        return hub_dataset(source)
    return local_files(source, {str(file): file for file in files_named(name)})


def share_to_hold_out(source: Source, target: int) -> float:
    """Return the share of `source` that a recipe for windows of `target` tokens (L') holds out: about four windows and
    ten documents, a fiftieth to a fifth of local text, and a hundredth of a data set on the hub.
    """
    if not looks_local(source.name):
        return 0.01
    table = find_table(source)
    documents = len(table.texts) or sum(1 for _ in itertools.islice(table.read([source.column], None), 500))
    share = max(16 * target / table.size, 10 / documents if documents > 1 else 0)
    return round(min(0.2, max(0.02, share)), 2)


# What a source of text and `evaluation.perplexity` have in common.
HELD_OUT_KEYS = {"column", "subset", "split", "hold_out"}
# Repository, commit and file. Of PG-19 all 100 books of the test split; `deepmind/pg19` itself needs a script.
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


def evaluation_documents(options: PerplexityOptions) -> Iterator[Document]:
    """Return the documents to measure on, read as they are asked for in a fixed order: of `builtin:stdlib` and of the
    hub those of the split, or of `PINNED`; with `hold_out` only those that training leaves out. Raise DataError if
    there are none, or while reading.
    """
    name = options.data or STDLIB
    if name == RECALL:
        raise DataError(f"{RECALL}: is for training; measure recall with `pi-lora eval passkey`")
    if name in PINNED:
        return hub_file(*PINNED[name]).documents()
    # The first of a large data set are measured without downloading all of it.
    keys = {"streaming": options.hold_out is not None, **options.model_dump(include=HELD_OUT_KEYS)}
    return find_table(Source(name=name, **keys)).documents(held_out=True)
