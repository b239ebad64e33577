"""The hub's reader on a local folder laid out like a repository of the hub: `datasets` reads both the same way."""

from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pi_lora.data import sources
from pi_lora.data.sources import evaluation_documents, hub_dataset, hub_file
from pi_lora.errors import DataError
from pi_lora.recipe.schema import Source

ROWS = 200
CARD = """---
configs:
- {config_name: en, data_files: [{split: train, path: "en/train-*.parquet"}, {split: test, path: "en/test-*.parquet"}]}
- {config_name: de, data_files: [{split: train, path: "de/*.parquet"}]}
---
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # Threads that read Parquet are given five seconds to end (apache/arrow#45214).
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.1)
    folder = tmp_path / "repository"
    for part in ("en", "de"):
        (folder / part).mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    for shard in range(4):
        rows = [f"en {shard} {row}" for row in range(ROWS // 4)]
        pq.write_table(pa.table({"content": rows, "n": range(len(rows))}), folder / f"en/train-{shard:05}.parquet")
    pq.write_table(pa.table({"content": ["test"], "n": [0]}), folder / "en/test-00000.parquet")
    pq.write_table(pa.table({"content": ["deutsch"], "n": [0]}), folder / "de/train.parquet")
    return folder


def read(folder: Path, seed: int | None = None, **fields: object) -> list[str]:
    source = Source.model_validate({"name": str(folder), "column": "content", "subset": "en", **fields})
    return [document.text for document in hub_dataset(source).documents(seed)]


@pytest.mark.parametrize("streaming", [False, True])
def test_subset_split_and_column(repository: Path, streaming: bool) -> None:
    rows = read(repository, streaming=streaming)
    assert rows[:2] == ["en 0 0", "en 0 1"]
    assert len(rows) == ROWS
    assert read(repository, split="test", streaming=streaming) == ["test"]
    assert read(repository, subset="de", streaming=streaming) == ["deutsch"]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_seeded_order_is_a_shuffle_of_all_rows(repository: Path, streaming: bool) -> None:
    fixed, first, second = (read(repository, seed, streaming=streaming) for seed in (None, 1, 2))
    assert sorted(first) == sorted(second) == sorted(fixed)
    assert first == read(repository, 1, streaming=streaming)
    assert first not in (second, fixed)
    assert {row.split()[1] for row in first[:20]} != {"0"}


def test_a_streamed_data_set_is_read_as_it_is_needed(repository: Path) -> None:
    (repository / "en/train-00003.parquet").write_bytes(b"PAR1 cut off")
    source = Source(name=str(repository), column="content", subset="en", streaming=True)
    documents = hub_dataset(source).documents()
    assert next(documents).text == "en 0 0"
    with pytest.raises(DataError, match="nor a hub data set that can be read"):
        list(documents)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"column": "text"}, "has no column text; choose from its columns: content, n$"),
        ({"column": "n"}, "column n holds int, not text"),
        ({"split": "validation"}, r"nor a hub data set that can be read \(.*split.*validation"),
        ({"subset": "fr"}, r"nor a hub data set that can be read \(.*fr"),
    ],
)
def test_what_a_data_set_lacks_is_named(repository: Path, streaming: bool, fields: dict, message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        read(repository, streaming=streaming, **fields)
    # A row is named by its number.
    assert str(refused.value).startswith((f"{repository}: ", f"{repository}:1: "))
    assert "\n" not in str(refused.value)


def test_a_hub_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(DataError, match=r"^nobody/nothing: is neither a file or .*nobody/nothing"):
        list(evaluation_documents("nobody/nothing"))


def test_offline_it_is_the_commit_that_was_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A branch moves, and what was made from its former commit must not be taken for what is there now."""
    monkeypatch.setattr(sources, "HF_HUB_CACHE", str(tmp_path))
    refs = tmp_path / "datasets--owner--books" / "refs"
    refs.mkdir(parents=True)
    found = []
    for commit in ("0123abc", "4567def"):
        (refs / "main").write_text(commit)
        found.append(hub_dataset(Source(name="owner/books")).identity())
        assert hub_file("owner/books", "x.jsonl", "main").identity() == found[-1] == {"commit": commit}
    assert hub_dataset(Source(name="owner/never")).identity() == {"commit": "main"}


def test_the_commit_is_what_the_revision_stands_for(monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    assert hub_dataset(Source(name=str(repository), revision="v1")).identity() == {"commit": "v1"}
    asked = []

    class Api:
        def dataset_info(self, name: str, revision: str) -> SimpleNamespace:
            asked.append((name, revision))
            return SimpleNamespace(sha="0123abc")

    monkeypatch.setattr(sources, "HfApi", Api)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, revision, **options: pytest.fail(revision))
    found = hub_dataset(Source(name="owner/name", revision="v1"))
    assert found.identity() == {"commit": "0123abc"}
    with pytest.raises(pytest.fail.Exception, match="0123abc"):
        list(found.documents())
    assert asked == [("owner/name", "v1")]
