"""Every file that a command reads, damaged in the ways that files get damaged: one line and no traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import run_command, small_recipe
from pi_lora.recipe.files import dump_recipe
from reported import make_run

# The files of a folder that holds a model, a run of it, a recipe and texts, and a command that reads each of them.
READERS = {
    "recipe.yaml": "show recipe.yaml",
    "texts.jsonl": "eval perplexity model --data texts.jsonl --windows 64 --stride 32",
    "model/config.json": "eval perplexity model --data texts.jsonl --windows 64 --stride 32",
    "model/tokenizer.json": "eval perplexity model --data texts.jsonl --windows 64 --stride 32",
    "model/model.safetensors": "eval perplexity model --data texts.jsonl --windows 64 --stride 32",
    "run/config.json": "eval passkey run --depths 1 --trials 1",
    "run/adapter_config.json": "eval passkey run --depths 1 --trials 1",
    "run/adapter_model.safetensors": "eval passkey run --depths 1 --trials 1",
    "run/run.json": "report run",
    "run/recipe.yaml": "report run",
    "run/scores/perplexity.json": "report run",
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    # Within a line: YAML that ends behind one may be a whole recipe.
    "cut off": lambda content: content[: content.rfind(b": ", 0, len(content) // 2)],
    "of zeros": lambda content: bytes(len(content)),
    "of wrong types": lambda content: (
        b'{"measurement": "perplexity", "model": 3, "model_type": [], "windows": 3, "text": 3}\n'
    ),
}


@pytest.fixture(scope="module")
def whole(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file of READERS, undamaged."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(small_model, folder / "model")
    make_run(folder / "model", folder / "run")
    (folder / "recipe.yaml").write_text(dump_recipe(small_recipe(folder / "model")))
    text = "It was the best of times, it was the worst of times. " * 9
    (folder / "texts.jsonl").write_text(json.dumps({"text": text}) + "\n")
    return folder


def run_in(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    """Run a command in `folder`; return its exit status and what it printed on stdout and stderr."""
    monkeypatch.chdir(folder)
    return run_command(*line.split()), *capsys.readouterr()


@pytest.mark.parametrize("file", READERS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(
    file: str,
    damage: str,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = shutil.copytree(whole, tmp_path / "damaged")
    (folder / file).write_bytes(DAMAGES[damage]((whole / file).read_bytes()))
    status, out, err = run_in(READERS[file], folder, capsys, monkeypatch)
    assert status == 2, err
    assert out == ""
    assert len(err.splitlines()) == 1 or file.endswith("yaml"), err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", dict.fromkeys(READERS.values()))
def test_undamaged_files_are_read(
    command: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(whole, tmp_path / "whole")
    status, out, err = run_in(command, folder, capsys, monkeypatch)
    assert status == 0, err
    assert out
