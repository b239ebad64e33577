"""`builtin:stdlib`: the sources of Python's standard library, a real corpus that is present wherever Python is."""

import hashlib
import os
import platform
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from pi_lora.data.documents import Corpus, Document, LocalFiles, fingerprint, looks_local
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Source

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


def stdlib_files(split: str) -> Iterator[tuple[str, Path]]:
    """Yield `(name, file)` of every standard-library file in `split`, in a fixed order.

    Raises:
        ValueError: `split` is not one of `SPLITS`.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(_python_files(root)):
        name = path.relative_to(root).as_posix()
        if is_held_out(name) == (split == "held-out"):
            yield name, path


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        # Not entered at all: what is installed beside the library is often a hundred times as much.
        folders[:] = (name for name in folders if name not in SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def stdlib_documents(split: str) -> Iterator[tuple[str, str]]:
    """Yield `(name, text)` of every standard-library file in `split` that is not empty, in a fixed order.

    Raises:
        ValueError: `split` is not one of `SPLITS`.
    """
    for name, path in stdlib_files(split):
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip():
            yield name, text


@dataclass(frozen=True)
class StandardLibrary(Corpus):
    """One split of the standard library's sources; a few megabytes, so a seeded order shuffles them all."""

    name: str
    split: str

    def read(self, seed: int | None) -> Iterator[Document]:
        """File after file."""
        documents = [Document(*each) for each in stdlib_documents(self.split)]
        if seed is not None:
            random.Random(seed).shuffle(documents)
        return iter(documents)

    def identity(self) -> dict[str, Any]:
        """The Python that it belongs to, and its files."""
        files = fingerprint(path for _, path in stdlib_files(self.split))
        return {"python": platform.python_version(), "sha256": files}


@dataclass(frozen=True)
class Choice:
    """Which documents of a source are measured, and how much of each.

    The first `documents` that have at least `min_tokens`, or with a `seed` as many drawn at random, `truncate`d to
    their first so many tokens. `split` and `column` are of hub data sets, `column` also of rows in local files.
    """

    documents: int | None = None
    min_tokens: int | None = None
    truncate: int | None = None
    seed: int | None = None
    split: str = "test"
    column: str = "text"


@dataclass(frozen=True)
class HubFile(Corpus):
    """One file of a data set on the hub, at a commit: its test split as it was uploaded, with no script to run."""

    name: str
    file: str
    revision: str
    column: str

    def read(self, seed: int | None) -> Iterator[Document]:
        """Row after row, named by where they are on the hub."""
        path = self._fetched()
        for document in LocalFiles(self.name, (path,), self.column).read(seed):
            yield replace(document, name=document.name.replace(str(path), f"{self.name}/{self.file}", 1))

    def identity(self) -> dict[str, Any]:
        """The file and its commit."""
        return {"file": self.file, "commit": self.revision}

    def _fetched(self) -> Path:
        try:
            return Path(hf_hub_download(self.name, self.file, repo_type="dataset", revision=self.revision))
        except (OSError, HfHubHTTPError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise DataError(
                f"{self.name}: {self.file} cannot be had from the hub ({reason}); "
                "check the network, or fetch the file elsewhere and name it instead"
            ) from None


@dataclass(frozen=True)
class Preset:
    """A source and the paper's choice among its documents."""

    corpus: HubFile
    choice: Choice

    def completed(self, asked: Choice) -> Choice:
        """The paper's choice where `asked` leaves something open."""
        paper = self.choice
        return replace(
            asked,
            documents=asked.documents or paper.documents,
            min_tokens=asked.min_tokens or paper.min_tokens,
            truncate=asked.truncate or paper.truncate,
            seed=paper.seed if asked.seed is None else asked.seed,
        )


PRESETS = {
    # All 100 books of the test split; `deepmind/pg19` itself needs a script.
    "pg19": Preset(
        HubFile(
            "emozilla/pg19-test",
            "data/test-00000-of-00001-29a571947c0b5ccc.parquet",
            "c5e39bf32e33f9111323aa68d7d9000d22722035",
            "text",
        ),
        Choice(),
    ),
    # 128 documents drawn from those of 32768 tokens and more; which the paper drew is not known.
    "proof-pile": Preset(
        HubFile(
            "hoskinson-center/proof-pile",
            "test/proofpile_test.jsonl.gz",
            "490b980249446f2f3bd2df3a8cf085d0f2de240a",
            "text",
        ),
        Choice(documents=128, min_tokens=32768, truncate=32768, seed=0),
    ),
}


STDLIB = "builtin:stdlib"
RECALL = "builtin:recall"
HUB_FIELDS = ("subset", "split", "revision", "streaming")


def find_corpus(source: Source, split: str = "train") -> Corpus:
    """The corpus that `source` names, before its text is read; `split` is of `builtin:stdlib`.

    Raises:
        DataError: nothing is there; of a hub data set that shows when it is read.
    """
    if source.name == STDLIB:
        return StandardLibrary(STDLIB, split)
    if source.name.startswith("builtin:"):
        raise DataError(f"{source.name}: no such built-in corpus; there are {STDLIB} and {RECALL}")
    if looks_local(source.name):
        return LocalFiles.find(source.name, source.column)
    # `datasets` takes a second to import, and local text does without.
    from pi_lora.data.hub import HubDataset

    return HubDataset(source)


def evaluation_documents(source: str, split: str = "test", column: str = "text") -> Iterator[Document]:
    """The documents to measure on, in a fixed order, read when asked for: of `builtin:stdlib`, the held-out files.

    `split` is of hub data sets; `source` may also be one of `PRESETS`, which know their own.

    Raises:
        DataError: the source does not exist, or (while reading) holds no readable text.
    """
    if source == RECALL:
        raise DataError(f"{RECALL}: is for training; measure recall with `pi-lora eval passkey`")
    if source in PRESETS:
        return PRESETS[source].corpus.documents()
    return find_corpus(Source(name=source, split=split, column=column), split="held-out").documents()


def source_problems(data: Data) -> list[str]:
    """What is wrong with the sources as far as their first documents tell, a line each; the hub is not asked."""
    return [f"data.source: {problem}" for source in data.source for problem in _problems(source)]


def _problems(source: Source) -> Iterator[str]:
    if not source.name.startswith("builtin:") and not looks_local(source.name):
        return
    for field in HUB_FIELDS:
        if getattr(source, field) != Source.model_fields[field].default:
            yield f"{source.name}: {field} is for data sets of the hub, and this is not one; remove it"
    if source.name == RECALL:
        return
    try:
        next(find_corpus(source).documents())
    except DataError as problem:
        yield str(problem)
