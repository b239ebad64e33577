"""What the paper measures perplexity on (paper.tex, section 3.2), by name, and which documents of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from pi_lora.data.documents import Corpus, Document
from pi_lora.data.files import LocalFiles
from pi_lora.errors import DataError


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
