"""Typed results and the files that hold them: what is written is read again, and what is broken is one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import refused
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
from pi_lora.evaluation.suite import metrics_of, read_scores, write_scores
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
        options=BenchmarksOptions(data=("boolq=dev.jsonl",), chat=True),
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


def test_newer_score_files_are_read_and_keep_what_they_hold(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    write_json(file, {"measurement": "perplexity", "model": "m", "options": {}, "windows": [], "of_tomorrow": 1})
    newer = read_scores(file)
    assert isinstance(newer, PerplexityScores)
    assert newer.options == PerplexityOptions()
    assert newer.model_dump(exclude_unset=True)["of_tomorrow"] == 1
    write_json(file, {"options": {}, "windows": []})
    assert read_scores(file) is None


def test_perplexities_with_bos_in_each_window_and_in_each_document_are_no_pairs() -> None:
    [scores, *_] = RESULTS
    metrics = {bos: metrics_of(scores.model_copy(update={"bos": bos}))[0] for bos in ("each window", "each document")}
    assert not metrics["each window"].compares_with(metrics["each document"])
    assert metrics["each window"].compares_with(metrics["each window"])


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (
            '{"measurement": "perplexity", "model": "m", "options": {}, "windows": [{"window": 64, "tokens": 3}]}',
            "windows.0.perplexity: ",
        ),
        ('{"measurement": "passkey", "model": "m", "options": {}, "k_max": 64, "depths": []}', "target: "),
        ('{"model": "m", "windows"', ""),
    ],
)
def test_a_broken_score_file_is_refused_in_one_line(text: str, where: str, tmp_path: Path) -> None:
    file = tmp_path / "perplexity.json"
    file.write_text(text)
    with refused(ModelError, f"{file}: {where}", "remove it"):
        read_scores(file)


@pytest.mark.parametrize("file", sorted(ADAPTERS.glob("*/scores/*.json")), ids=lambda file: file.stem)
def test_released_score_files_are_read(file: Path) -> None:
    scores = read_scores(file)
    assert scores is not None
    assert metrics_of(scores)
