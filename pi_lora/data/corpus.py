"""Where documents come from: the built-in corpora, local text files and folders of them."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pi_lora.data.recall import Counter, recall_documents
from pi_lora.data.stdlib import stdlib_documents
from pi_lora.errors import DataError

STDLIB = "builtin:stdlib"
RECALL = "builtin:recall"
TEXT_SUFFIXES = (".txt", ".md", ".tex", ".py", ".rst")


@dataclass(frozen=True)
class Document:
    """A text and where it came from."""

    name: str
    text: str


def training_documents(source: str, seed: int, budget: int, count: Counter) -> Iterator[Document]:
    """The documents of `source` in a seeded order; `builtin:recall` makes them up, `budget` tokens each at most.

    Raises:
        DataError: the source does not exist, or holds no readable text.
    """
    if source == RECALL:
        lines = [line for _, text in stdlib_documents("train") for line in text.splitlines() if line.strip()]
        return (Document(RECALL, text) for text in recall_documents(seed, budget, count, lines))
    found = [Document(*each) for each in stdlib_documents("train")] if source == STDLIB else _local_documents(source)
    random.Random(seed).shuffle(found)
    return iter(found)


def evaluation_documents(source: str) -> list[Document]:
    """The documents to measure on, in a fixed order: of `builtin:stdlib`, the held-out files.

    Raises:
        DataError: the source does not exist, or holds no readable text.
    """
    if source == STDLIB:
        return [Document(*each) for each in stdlib_documents("held-out")]
    if source == RECALL:
        raise DataError(f"{RECALL}: is for training; measure recall with `pi-lora eval passkey`")
    return _local_documents(source)


def _local_documents(source: str) -> list[Document]:
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
        if not files:
            raise DataError(f"{source}: holds no text files ({', '.join(TEXT_SUFFIXES)}); name a folder that does")
    elif path.is_file():
        files = [path]
    elif source.startswith("builtin:"):
        raise DataError(f"{source}: no such built-in corpus; there are {STDLIB} and {RECALL}")
    else:
        raise DataError(f"{source}: no such file or folder; name a text file, a folder of them, or {STDLIB}")
    documents = [Document(str(file), _read(file)) for file in files]
    kept = [document for document in documents if document.text.strip()]
    if not kept:
        raise DataError(f"{source}: holds no text, its files are empty; name one with text")
    return kept


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{file}: is not UTF-8 text; convert it, or name a text file") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); check its permissions") from None
    if "\0" in text:
        raise DataError(f"{file}: is a binary file; name a text file")
    return text


def interleave(
    streams: Sequence[Iterator[list[int]]], weights: Sequence[float], seed: int
) -> Iterator[tuple[int, list[int]]]:
    """Draw sequences from several streams, each as often as its weight says; yields `(stream, sequence)`."""
    rng = random.Random(seed)
    for index in itertools.repeat(range(len(streams))):
        chosen = rng.choices(index, weights)[0]
        sequence = next(streams[chosen], None)
        if sequence is None:
            return
        yield chosen, sequence
