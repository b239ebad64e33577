"""Sources of documents: Python's standard library, present wherever Python is, the paper's test sets, and a user's."""

import hashlib
import os
import platform
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pi_lora.data.documents import Document, files_named, fingerprint, looks_local
from pi_lora.data.tables import DOCUMENT_SUFFIXES, HubDataset, HubFile, LocalFiles, NamedRow, Table
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Source
from pi_lora.types import Json

STDLIB = "builtin:stdlib"
RECALL = "builtin:recall"
HUB_FIELDS = ("subset", "split", "revision", "streaming")

# Tests and vendored packages are not in every installation; code page tables and the compiled help are hardly text.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
HELD_OUT_SHARE = 0.1
SPLITS = ("train", "held-out")


def is_held_out(relative_path: str) -> bool:
    """Whether a file belongs to the held-out split; decided by its name alone, so the same under every Python."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_SHARE


def stdlib_files(split: str) -> dict[str, Path]:
    """Return every standard-library file in `split` (one of `SPLITS`) by its name, in a fixed order."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        # Not entered at all: what is installed beside the library is often a hundred times as much.
        folders[:] = (name for name in folders if name not in SKIPPED_FOLDERS)
        found += (Path(folder, name) for name in files if name.endswith(".py"))
    named = {path.relative_to(root).as_posix(): path for path in sorted(found)}
    return {name: path for name, path in named.items() if is_held_out(name) == (split == "held-out")}


def stdlib_documents(split: str) -> Iterator[tuple[str, str]]:
    """Yield `(name, text)` of every file of `stdlib_files` that is not blank."""
    read = ((name, path.read_text(encoding="utf-8", errors="replace")) for name, path in stdlib_files(split).items())
    yield from ((name, text) for name, text in read if text.strip())


@dataclass(frozen=True)
class StandardLibrary(Table):
    """One split of the standard library's sources; a few megabytes, so a seeded order shuffles them all."""

    split: str
    name: str = STDLIB
    column: str = "text"

    def rows(self, columns: Sequence[str], seed: int | None = None) -> Iterator[NamedRow]:
        """Yield file after file, its text under every column."""
        documents = list(stdlib_documents(self.split))
        if seed is not None:
            random.Random(seed).shuffle(documents)
        return ((name, dict.fromkeys(columns, text)) for name, text in documents)

    def identity(self) -> Json:
        """Return the Python that it belongs to, and a digest of its files."""
        return {"python": platform.python_version(), "sha256": fingerprint(stdlib_files(self.split).values())}


@dataclass(frozen=True)
class Choice:
    """The first `documents` of at least `min_tokens`, or with a `seed` as many at random, `truncate`d to that length.

    `split` and `column` are of hub data sets, `column` also of rows in local files.
    """

    documents: int | None = None
    min_tokens: int | None = None
    truncate: int | None = None
    seed: int | None = None
    split: str = "test"
    column: str = "text"


@dataclass(frozen=True)
class Preset:
    """A source and the paper's choice among its documents."""

    corpus: HubFile
    choice: Choice

    def completed(self, asked: Choice) -> Choice:
        """Return `asked`, with the paper's choice where it leaves something open."""
        return replace(self.choice, **{key: value for key, value in asdict(asked).items() if value is not None})


PG19_FILE = "data/test-00000-of-00001-29a571947c0b5ccc.parquet"
PG19 = HubFile("emozilla/pg19-test", PG19_FILE, "c5e39bf32e33f9111323aa68d7d9000d22722035")
PROOF_PILE_COMMIT = "490b980249446f2f3bd2df3a8cf085d0f2de240a"
PROOF_PILE = HubFile("hoskinson-center/proof-pile", "test/proofpile_test.jsonl.gz", PROOF_PILE_COMMIT)
PRESETS = {
    # All 100 books of the test split; `deepmind/pg19` itself needs a script.
    "pg19": Preset(PG19, Choice()),
    # 128 documents drawn from those of 32768 tokens and more; which the paper drew is not known.
    "proof-pile": Preset(PROOF_PILE, Choice(documents=128, min_tokens=32768, truncate=32768, seed=0)),
}


def find_corpus(source: Source, split: str = "train") -> Table:
    """Find the documents that `source` names, of `builtin:stdlib` those of `split`; DataError if they are not there.

    Whether a data set is on the hub shows when it is read.
    """
    name = source.name
    if name == STDLIB:
        return StandardLibrary(split)
    if name.startswith("builtin:"):
        raise DataError(f"{name}: no such built-in corpus; there are {STDLIB} and {RECALL}")
    if looks_local(name):
        return LocalFiles(name, files_named(name, DOCUMENT_SUFFIXES), source.column)
    return HubDataset(source)


def evaluation_documents(source: str, split: str = "test", column: str = "text") -> Iterator[Document]:
    """Return the documents to measure on, in a fixed order, read as they are asked for.

    Of `builtin:stdlib` they are the held-out files. `split` is of hub data sets; `PRESETS` know their own. Raises
    DataError if the source does not exist, or while reading if it holds no readable text.
    """
    if source == RECALL:
        raise DataError(f"{RECALL}: is for training; measure recall with `pi-lora eval passkey`")
    if source in PRESETS:
        return PRESETS[source].corpus.documents()
    return find_corpus(Source(name=source, split=split, column=column), split="held-out").documents()


def source_problems(data: Data) -> list[str]:
    """Return what is wrong with the sources as far as their first documents tell, a line each, without the hub."""
    problems = []
    for source in data.source:
        name = source.name
        if not name.startswith("builtin:") and not looks_local(name):
            continue
        given = (field for field in HUB_FIELDS if getattr(source, field) != Source.model_fields[field].default)
        problems += [f"{name}: {field} is for data sets of the hub, and this is not one; remove it" for field in given]
        try:
            if name != RECALL:
                next(find_corpus(source).documents())
        except DataError as problem:
            problems.append(str(problem))
    return [f"data.source: {problem}" for problem in problems]
