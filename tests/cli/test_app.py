"""The command line: quick to start, a mistake is one line, and the whole method from train to merge."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import run_captured, run_command, small_recipe
from pi_lora import cli
from pi_lora.recipe.files import dump_recipe
from processes import without_progress

REPOSITORY = Path(__file__).parents[2]
DEMO = str(REPOSITORY / "recipes" / "demo.yaml")


LIBRARIES_OF_HELP = "import cyclopts, pydantic, rich.console, rich.progress, rich.table"


def processor_seconds(code: str) -> tuple[float, str]:
    """The seconds of the processor that Python takes for `code`, and the output. Seconds on the clock are longer beside
    other work; these too where cores share a cache.
    """
    before = os.times()
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, answer.stdout.rstrip()


def test_help_starts_without_torch_in_half_a_second() -> None:
    """On a slow processor in less than four times what the libraries of the command line take."""
    probe = (
        "import sys; sys.argv = ['pi-lora', '--help']\n"
        "from pi_lora.cli import main\n"
        "try: main()\n"
        "finally: print('heavy' if {'torch', 'transformers', 'yaml'} & set(sys.modules) else 'light')"
    )
    for _ in range(10):
        libraries, _ = processor_seconds(LIBRARIES_OF_HELP)
        seconds, output = processor_seconds(probe)
        assert output.endswith("light")
        if seconds < max(0.5, 4 * libraries):
            break
    else:
        pytest.fail(f"{seconds:.2f} s of the processor; the libraries take {libraries:.2f} s")


@pytest.mark.parametrize("delay", [0.15, 0.5, 4])
def test_ctrl_c_during_startup_is_one_line(tmp_path: Path, delay: float) -> None:
    """After so many seconds of the processor, of which Python itself takes the first 0.1 to import its own."""
    command = [sys.executable, "-m", "pi_lora", "train", DEMO, "training.steps=100000", "--output", "run"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes) as process:
        while sum(psutil.Process(process.pid).cpu_times()[:2]) < delay:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        errors = without_progress(process.communicate(timeout=100)[1])
    assert (process.returncode, errors.count("\n")) == (130, 1), errors
    assert errors.startswith("interrupted; nothing was written") or "interrupted after step" in errors


@pytest.mark.parametrize("streams", [">&-", "<&- >&- 2>&-"])
def test_a_command_runs_with_streams_that_its_caller_closed(streams: str) -> None:
    command = ["sh", "-c", f'exec "$0" -m pi_lora recipes {streams}', sys.executable]
    completed = subprocess.run(command, capture_output=True, check=False)
    assert (completed.returncode, completed.stderr) == (0, b"")


def test_a_python_without_docstrings_is_refused() -> None:
    """transformers builds the documentation of classes when it is imported."""
    command = [sys.executable, "-OO", "-m", "pi_lora", "plan", DEMO]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr.count("\n")) == (2, 1)
    assert "run Python without it" in completed.stderr


@pytest.mark.parametrize(
    ("arguments", "where", "names"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml: ", ["pi-lora recipes"]),
        (["train", "taken"], "taken: ", ["folder", "recipe.yaml"]),
        (["train", "nowhere", "--resume"], "nowhere: ", ["run", "recipe"]),
        (["eval", "perplexity", "builtin:tiny", "--data", "gone/"], "--data: gone/: ", ["path"]),
        (["eval", "perplexity", "builtin:tiny", "--data", "taken"], "--data: taken: ", ["readable"]),
        (["eval", "all", "builtin:tiny"], "builtin:tiny: ", ["recipe.yaml"]),
        (["train", DEMO, "context.target=200"], "context.target: 200 ", ["256"]),
        (["train", DEMO, "--output", "taken"], "taken: ", ["exists"]),
        (["merge", "nowhere"], "nowhere: ", ["HF_HUB_OFFLINE=1"]),
        (["eval", "perplexity", "builtin:tiny", "--windows", "1"], "--windows: ", ["greater than 1"]),
        (["eval", "perplexity", "builtin:tiny", "--windows", "500000"], "--data: builtin:stdlib: ", ["500000"]),
        (["eval", "perplexity", "builtin:tiny", "--column", "messages"], "--column: messages ", ["chats", "texts"]),
        (["eval", "perplexity", "builtin:tiny", "--stride", "300"], "stride: 300 ", ["256"]),
        (["eval", "perplexity", "builtin:tiny", "--scaling", "pi"], "--original, --scaling, --factors: ", ["--target"]),
        (["eval", "passkey", "builtin:tiny", "--target", "40"], "--target: 40 ", ["passkey"]),
        (["trian"], "pi-lora: ", ['"trian"', '"train"', "pi-lora --help"]),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    where: str,
    names: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    status, out, err = run_captured(capsys, monkeypatch, *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1, err
    assert err.startswith(where)
    assert all(name in err for name in names), err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_run_and_its_merge_measure_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_model: Path
) -> None:
    """The whole road as a user walks it: a run brings its own scaling, and the merged folder measures the same."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(dump_recipe(small_recipe(small_model, context={"target": 256})))
    Path("text.txt").write_text("The door is open and the road is long. " * 60)
    assert run_captured(capsys, monkeypatch, "train", "mine.yaml")[0] == 0
    assert run_captured(capsys, monkeypatch, "merge", "adapters/mine")[0] == 0
    measured = []
    for model in ("adapters/mine", "models/mine"):
        options = ["--data", "text.txt", "--windows", "64,256", "--stride", "32", "--json", "scores.json"]
        status, out, _ = run_captured(capsys, monkeypatch, "eval", "perplexity", model, *options)
        assert status == 0
        scores = json.loads(Path("scores.json").read_text())
        assert (scores["model"], scores["scale"], scores["stride"]) == (model, 4, 32)
        assert [row["window"] for row in scores["windows"]] == [64, 256]
        assert f"{scores['windows'][0]['perplexity']:,.3f}" in out
        measured.append([row["perplexity"] for row in scores["windows"]])
    assert measured[0] == pytest.approx(measured[1], rel=1e-5)


def test_a_missing_package_of_an_extra_is_named_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setattr("pi_lora.evaluation.suite.load_model", lambda *_: pytest.fail("was read"))
    status, out, err = run_captured(capsys, monkeypatch, "eval", "summarization", "builtin:tiny")
    assert (status, out) == (2, "")
    line = err.splitlines()[-1]
    assert line.startswith("pi-lora: ")
    assert "rouge_score" in line
    assert "pip install 'pi-lora[eval]'" in line


def test_an_unforeseen_error_is_one_line_and_its_traceback_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero\nin a library")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ending:
        cli.main()
    [line] = capsys.readouterr().err.splitlines()
    [log] = tmp_path.iterdir()
    assert ending.value.code == 1
    assert "ZeroDivisionError: division by zero" in line
    assert str(log) in line
    assert "in fail" in log.read_text()


def test_a_cache_that_cannot_be_written_names_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "home" / ".cache" / "pi-lora"))
    (tmp_path / "recipe.yaml").write_text(dump_recipe(small_recipe("builtin:tiny", context={"target": 512})))
    assert run_command("prepare", str(tmp_path / "recipe.yaml")) == 2
    assert "set PI_LORA_CACHE" in capsys.readouterr().err


def test_a_wrong_value_is_told_all_types_that_it_may_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = run_captured(capsys, monkeypatch, "eval", "passkey", "builtin:tiny", "--chat", "maybe")
    assert (status, err.count("\n")) == (2, 1)
    assert all(part in err for part in ("--chat: ", "auto", "boolean", "maybe"))
