"""Data sets of the Hugging Face hub as a source, downloaded or streamed."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from datasets import load_dataset
from huggingface_hub import HfApi

from pi_lora.data.documents import Corpus, Document, shuffled, text_of
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Source

# `datasets` reads ten files of a streamed data set in turns into a buffer that counts rows, however long they are; few
# of them are enough, since ours, which counts characters, comes after it.
STREAMED_ROWS = 100


class HubDataset(Corpus):
    """A split of a hub data set; nothing is fetched before it is read.

    The seeded order permutes all rows of a data set that is on disk. Of a streamed one it permutes the files, reads
    several in turns, and their rows go through a buffer.
    """

    def __init__(self, source: Source) -> None:
        self.name, self.source = source.name, source

    @cached_property
    def commit(self) -> str:
        """The commit that the revision stands for now; where the hub cannot be asked, the revision as it is written."""
        try:
            return HfApi().dataset_info(self.name, revision=self.source.revision).sha or self.source.revision
        except Exception:
            # Offline, gone or gated: loading finds out which, and has the data set on disk or says why not.
            return self.source.revision

    def identity(self) -> dict[str, Any]:
        """The commit."""
        return {"commit": self.commit}

    def read(self, seed: int | None) -> Iterator[Document]:
        """Row after row.

        Raises:
            DataError: (while reading) the data set, its subset or split cannot be had, or its column holds no text.
        """
        column = self.source.column
        documents = (Document(self.name, text_of(row, column, self.name)) for row in self.rows([column], seed))
        return shuffled(documents, seed) if seed is not None and self.source.streaming else documents

    def rows(self, columns: Sequence[str], seed: int | None = None) -> Iterator[Mapping[str, Any]]:
        """Row after row, with at least those of `columns` that there are.

        Raises:
            DataError: (while reading) the data set, its subset or split cannot be had.
        """
        try:
            dataset = self._with(columns)
            if seed is not None:
                dataset = dataset.shuffle(seed, **({"buffer_size": STREAMED_ROWS} if self.source.streaming else {}))
            yield from dataset
        except Exception as error:
            # `datasets` raises a dozen kinds for what a user can mend: not found, gated, offline, no such split.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{self.name}: is no file or folder, and cannot be had as a hub data set ({reason}); "
                "check its name, subset, split and revision, the network, or log in with `hf auth login`"
            ) from error

    def _with(self, columns: Sequence[str]) -> Any:
        # What is not needed is not decoded. A streamed data set may not know its columns before its first row.
        names = self._dataset.column_names
        return self._dataset.select_columns(list(columns)) if names and set(columns) <= set(names) else self._dataset

    @cached_property
    def _dataset(self) -> Any:
        source = self.source
        return load_dataset(
            source.name, source.subset, split=source.split, revision=self.commit, streaming=source.streaming
        )
