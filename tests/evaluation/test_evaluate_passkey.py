import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import without_progress
from rich.console import Console

from pi_lora import cli
from pi_lora.evaluation import forward
from pi_lora.evaluation.forward import SharedPrefix
from pi_lora.evaluation.measurement import as_json
from pi_lora.evaluation.passkey import Grid, PasskeyScores, PasskeyTest, evaluate_passkey
from pi_lora.evaluation.suite import read_scores, scores_table, write_scores
from pi_lora.models.model import Extension, Model, load
from pi_lora.recipe.evaluation import PasskeyOptions

Run = Callable[..., tuple[int, str, str]]
ASKED = PasskeyOptions(target=320, depths=4, trials=3)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where interrupted evaluations are kept."""
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "evaluations"


@pytest.fixture
def pi_lora(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept: Path) -> Run:
    """Exit status, stdout and stderr of `pi-lora eval passkey ARGUMENTS`."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pi-lora", "eval", "passkey", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, without_progress(captured.err)

    return run


@pytest.fixture(scope="module")
def stretched() -> Model:
    return load("builtin:tiny", Extension(320, 256))


@pytest.fixture(scope="module")
def scores(stretched: Model) -> PasskeyScores:
    return evaluate_passkey(stretched, ASKED)


def test_the_result_says_what_was_measured_and_how(scores: PasskeyScores, tmp_path: Path) -> None:
    assert (scores.model, scores.scale, scores.target, scores.seed) == ("builtin:tiny", 1.25, 320, 0)
    assert (scores.kernel, scores.dtype, scores.decoding) == ("sdpa", "float32", "greedy")
    assert [row.k for row in scores.depths] == [80, 160, 240, 320]
    for row in scores.depths:
        assert row.outcomes is not None
        assert row.trials == len(row.outcomes) == 3
        assert row.success_rate == sum(row.outcomes) / 3
    assert "left_out" not in as_json(scores)
    write_scores(scores, tmp_path / "scores.json")
    assert read_scores(tmp_path / "scores.json") == scores


def test_prompts_are_computed_whole_where_nothing_can_be_shared(
    stretched: Model, scores: PasskeyScores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of keys and values alone every layer keeps those of 320 tokens and more."""
    monkeypatch.setattr(SharedPrefix, "cache", lambda *_: pytest.fail("was shared"))
    monkeypatch.setattr(forward, "free_memory", lambda _device: 2**20)
    assert evaluate_passkey(stretched, ASKED) == scores
    monkeypatch.undo()
    monkeypatch.setattr(forward, "free_memory", lambda _device: 2**40)
    assert PasskeyTest(stretched, Grid(320, 1, 2))._prefix is None, "two trials save no more than a prompt costs"
    assert PasskeyTest(stretched, Grid(320, 1, 3))._prefix is not None


def test_two_processes_write_what_one_writes(python: str, kept: Path, tmp_path: Path) -> None:
    options = ["builtin:tiny", "--original", "256", "--target", "336", "--depths", "5", "--trials", "4"]
    launchers = {"one": [], "two": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]}
    said = {}
    for name, launcher in launchers.items():
        command = [python, "-m", *launcher, "pi_lora", "eval", "passkey", *options, "--json", f"{name}.json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        said[name] = done.stdout
    assert (tmp_path / "one.json").read_text() == (tmp_path / "two.json").read_text()
    assert said["one"] == said["two"]
    assert len({row["success_rate"] for row in json.loads((tmp_path / "one.json").read_text())["depths"]}) > 1
    assert list(kept.iterdir()) == []


def test_the_longest_window_is_measured_unless_another_is_named(pi_lora: Run, tmp_path: Path, lora_run: Path) -> None:
    file = tmp_path / "scores.json"
    assert pi_lora(str(lora_run), "builtin:tiny", "--depths", "1", "--trials", "1", "--json", str(file))[0] == 0
    assert [scores["target"] for scores in json.loads(file.read_text())] == [256, 256]


def printed(table: Any) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_table_holds_what_was_measured(scores: PasskeyScores) -> None:
    alone = printed(scores_table([scores]))
    assert f"{scores.k_max} tokens" in alone
    assert all(f"{100 * row.success_rate:.0f} % (" in alone for row in scores.depths)
    cut = scores.model_copy(update={"model": "cut", "depths": scores.depths[:2]})
    lines = printed(scores_table([scores, cut])).splitlines()
    assert next(line for line in lines if "distance 320" in line).count("%") == 1


def test_several_lengths_are_each_measured_by_itself(stretched: Model, scores: PasskeyScores, tmp_path: Path) -> None:
    both = evaluate_passkey(stretched, PasskeyOptions(targets=(320, 200), depths=4, trials=3))
    shorter = evaluate_passkey(stretched, ASKED.changed(target=200))
    assert [(each.target, each.depths) for each in both.by_length] == [(200, shorter.depths), (320, scores.depths)]
    assert (both.target, both.k_max) == (320, scores.k_max)
    write_scores(both, tmp_path / "both.json")
    assert read_scores(tmp_path / "both.json") == both


def test_the_command_measures_several_lengths(pi_lora: Run, tmp_path: Path) -> None:
    words = "builtin:tiny --targets 200,120 --depths 2 --trials 1".split()
    files = ["--json", str(tmp_path / "map.json"), "--plot", str(tmp_path / "map.png")]
    status, out, errors = pi_lora(*words, *files)
    assert (status, errors) == (0, "")
    assert "120" in out
    found = read_scores(tmp_path / "map.json")
    assert isinstance(found, PasskeyScores)
    assert [each.target for each in found.by_length] == [120, 200]
    assert (tmp_path / "map.png").is_file()
    for wrong, line in (
        ("--target 300", "--targets: measures every depth"),
        ("--targets no", "--targets: input should be a valid integer"),
    ):
        status, _, errors = pi_lora(*words, *wrong.split())
        assert (status, errors.count("\n")) == (2, 1)
        assert errors.startswith(line)
