"""Where documents come from: a source of a recipe or a command to the corpus that it names."""

from collections.abc import Iterator

from pi_lora.data.documents import Corpus, Document
from pi_lora.data.files import LocalFiles, looks_local
from pi_lora.data.presets import PRESETS
from pi_lora.data.stdlib import StandardLibrary
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Data, Source

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
