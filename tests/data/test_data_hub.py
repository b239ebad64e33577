"""The hub's reader on a local folder laid out like a repository of the hub: `datasets` reads both the same way."""

import json
import shutil
from functools import partial
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import hf_hub_download

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


def test_a_file_is_of_the_commit_that_was_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A branch moves, and what was made from its former commit must not be taken for what is there now."""
    refs = tmp_path / "datasets--owner--books" / "refs"
    refs.mkdir(parents=True)
    monkeypatch.setattr(sources, "hf_hub_download", partial(hf_hub_download, cache_dir=tmp_path))
    for commit in ("1" * 40, "2" * 40):
        (refs / "main").write_text(commit)
        snapshot = refs.parent / "snapshots" / commit / "data"
        snapshot.mkdir(parents=True)
        (snapshot / "x.jsonl").write_text("{}")
        assert hub_file("owner/books", "data/x.jsonl", "main").identity() == {"commit": commit}


def on_disk(commit: str, texts: list[str], cache: Path) -> None:
    """What `datasets` keeps of owner/books when it has downloaded a commit."""
    folder = cache / "owner___books" / "default" / "0.0.0" / commit
    made = datasets.Dataset.from_dict({"text": texts})
    made.save_to_disk(folder.with_suffix(".saved"))
    folder.mkdir(parents=True)
    [arrow] = folder.with_suffix(".saved").glob("*.arrow")
    arrow.rename(folder / "books-train.arrow")
    shutil.rmtree(folder.with_suffix(".saved"))
    splits = {"train": {"name": "train", "num_bytes": 1, "num_examples": len(texts), "dataset_name": "books"}}
    info = {"config_name": "default", "dataset_name": "books", "features": made.features.to_dict(), "splits": splits}
    (folder / "dataset_info.json").write_text(json.dumps({**info, "version": {"version_str": "0.0.0"}}))


def test_offline_rows_are_of_the_commit_that_they_are_said_to_be_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the hub `datasets` takes what it downloaded last: that commit is recorded."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    first, second = "1" * 40, "2" * 40

    def rows(revision: str) -> tuple[object, list[str]]:
        table = hub_dataset(Source(name="owner/books", revision=revision))
        return table.identity()["commit"], [each.text for each in table.documents()]

    on_disk(first, ["one"], tmp_path / "datasets")
    assert rows("main") == rows(first) == (first, ["one"])
    on_disk(second, ["two"], tmp_path / "datasets")
    assert rows("main") == rows(second) == (second, ["two"])
    assert rows(first)[0] == second
