"""Typed results and the files that hold them: what is written is read again, and what is broken is one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from pi_lora.errors import ModelError
from pi_lora.evaluation.benchmarks import BenchmarkScores, TaskScore
from pi_lora.evaluation.measurement import Scores
from pi_lora.evaluation.passkey import PasskeyDepth, PasskeyScores
from pi_lora.evaluation.perplexity import (
    DocumentPerplexity,
    LossByPosition,
    PerplexityScores,
    PositionLoss,
    WindowPerplexity,
)
from pi_lora.evaluation.suite import differences, metrics_of, read_scores, write_scores
from pi_lora.recipe.evaluation import BenchmarksOptions, PasskeyOptions, PerplexityOptions
from pi_lora.storage import write_json

ADAPTERS = Path(__file__).parents[2] / "adapters"
WINDOWS = [
    WindowPerplexity(window=64, perplexity=9.5, tokens=100),
    WindowPerplexity(window=128, perplexity=8.0, tokens=90),
]
ABOUT: dict[str, Any] = {"model": "m", "scale": 2.0, "dtype": "float32", "kernel": "sdpa", "window": 128}
RESULTS: list[Scores] = [
    PerplexityScores(
        **ABOUT,
        options=PerplexityOptions(data="text.txt", stride=32),
        data="text.txt",
        documents=1,
        stride=32,
        windows=WINDOWS,
        per_document=[DocumentPerplexity(name="text.txt", tokens=150, windows=WINDOWS)],
        by_position=LossByPosition(window=128, bins=[PositionLoss(first=1, last=128, loss=2.5, tokens=127)]),
    ),
    PasskeyScores(
        **ABOUT,
        options=PasskeyOptions(),
        step=200,
        target=128,
        k_max=64,
        depths=[
            PasskeyDepth(k=64, distance=61, success_rate=0.5, trials=2, outcomes=[True, False]),
            PasskeyDepth(k=128, success_rate=0.0, trials=2),
        ],
    ),
    BenchmarkScores(
        **ABOUT,
        options=BenchmarksOptions(data=("boolq=dev.jsonl",)),
        tasks={"boolq": TaskScore(acc=1.0, stderr=None, examples=1)},
    ),
    PasskeyScores.model_validate(
        {
            **ABOUT,
            "options": {"targets": (64,)},
            "target": 64,
            "k_max": 0,
            "depths": [],
            "lengths": [{"target": 64, "k_max": 0, "depths": []}],
        }
    ),
]


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_written_scores_are_read_back_equal(result: Scores, tmp_path: Path) -> None:
    file = tmp_path / "new" / "scores.json"
    write_scores([result], file)
    again = read_scores(file)
    assert again == result
    assert again is not None
    assert again.model_fields_set == result.model_fields_set
    assert [path.name for path in file.parent.iterdir()] == ["scores.json"]


def test_a_score_file_holds_only_fields_that_were_set(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    write_scores([RESULTS[2]], file)
    content = json.loads(file.read_text())
    assert content["tasks"]["boolq"] == {"acc": 1.0, "stderr": None, "examples": 1}
    assert "step" not in content
    write_scores([RESULTS[0]], file)
    content = json.loads(file.read_text())
    assert content["by_position"]["bins"] == [{"from": 1, "to": 128, "loss": 2.5, "tokens": 127}]
    assert content["options"]["data"] == "text.txt"
    assert content["measurement"] == "perplexity"


def test_older_and_newer_score_files_are_read(tmp_path: Path) -> None:
    """Older ones do not name their measurement; newer ones may hold more."""
    file = tmp_path / "passkey-step-200.json"
    options = {"target": 512}
    write_json(file, {"model": "m", "target": 512, "k_max": 256, "seed": 0, "depths": [], "options": options})
    older = read_scores(file)
    assert isinstance(older, PasskeyScores)
    assert older.options == PasskeyOptions(target=512)
    write_json(file, {"measurement": "perplexity", "model": "m", "options": {}, "windows": [], "of_tomorrow": 1})
    newer = read_scores(file)
    assert isinstance(newer, PerplexityScores)
    assert newer.options == PerplexityOptions()
    assert newer.model_dump(exclude_unset=True)["of_tomorrow"] == 1


def test_older_scores_with_bos_before_documents_are_no_pairs_of_newer_ones(tmp_path: Path) -> None:
    file = tmp_path / "perplexity.json"
    documents = [{"name": "text.txt", "tokens": 150, "windows": [row.model_dump() for row in WINDOWS]}]
    windows = [row.model_dump() for row in WINDOWS]
    older = {"model": "m", "options": {}, "windows": windows, "per_document": documents}
    write_json(file, {**older, "bos": True})
    with_bos = read_scores(file)
    assert isinstance(with_bos, PerplexityScores)
    assert (with_bos.bos, with_bos.options.bos) == ("each document", "document")
    assert differences(PerplexityOptions(), with_bos, exclude_defaults=True) == ["bos"]
    assert not differences(PerplexityOptions(bos="document"), with_bos)
    newer = with_bos.model_copy(update={"bos": "each window"})
    assert not metrics_of(newer)[0].compares_with(metrics_of(with_bos)[0])

    write_json(file, {**older, "bos": False})
    without_bos = read_scores(file)
    assert isinstance(without_bos, PerplexityScores)
    assert without_bos.bos == "none"
    assert not differences(PerplexityOptions(), without_bos)
    assert metrics_of(without_bos)[0].compares_with(metrics_of(with_bos)[0])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            '{"model": "m", "options": {}, "windows": [{"window": 64, "tokens": 3}]}',
            "windows.0.perplexity: field required",
        ),
        (
            '{"measurement": "passkey", "model": "m", "options": {}, "k_max": 64, "depths": []}',
            "target: field required",
        ),
        ('{"model": "m", "windows"', "is not JSON"),
    ],
)
def test_a_broken_score_file_is_refused_in_one_line(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "perplexity.json"
    file.write_text(text)
    with pytest.raises(ModelError) as refusal:
        read_scores(file)
    assert str(refusal.value).startswith(f"{file}: {line}")
    assert str(refusal.value).endswith("; measure again or remove it")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("file", sorted(ADAPTERS.glob("*/scores/*.json")), ids=lambda file: file.stem)
def test_released_score_files_are_read(file: Path) -> None:
    scores = read_scores(file)
    assert scores is not None
    assert metrics_of(scores)
