"""A model's own Python code runs when the person at the keyboard says so, whatever the files of a run say."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from conftest import run_command
from pi_lora.recipe.files import RECIPE_FILE

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(__file__).with_name("RAN").touch()
Path({trace!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A file that appears when the code of `base` runs."""
    return tmp_path / "RAN"


@pytest.fixture
def base(small_model: Path, tmp_path: Path, trace: Path) -> Path:
    folder = Path(shutil.copytree(small_model, tmp_path / "base"))
    (folder / "own.py").write_text(CODE.format(trace=str(trace)))
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config |= {"model_type": "own", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def run(lora_run: Path, base: Path, tmp_path: Path) -> Path:
    """A run as someone may send it: all its files name `base`."""
    folder = Path(shutil.copytree(lora_run, tmp_path / "run"))
    for file in ("recipe.yaml", "adapter_config.json", "run.json", "config.json"):
        content = (yaml.safe_load if file == RECIPE_FILE else json.loads)((folder / file).read_text())
        if file == RECIPE_FILE:
            content["model"]["name"] = str(base)
        elif file == "config.json":
            content |= {"model_type": "own", "auto_map": {"AutoModelForCausalLM": f"{base}--own.OwnModel"}}
        elif file == "run.json":
            content["origin"]["path"] = str(base)
        else:
            content["base_model_name_or_path"] = str(base)
        (folder / file).write_text(yaml.safe_dump(content) if file == RECIPE_FILE else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "eval perplexity RUN",
        "eval passkey RUN",
        "eval benchmarks RUN",
        "eval summarization RUN",
        "eval all RUN",
        "summarize RUN README.md",
        "merge RUN --output OUT",
        "train RUN/recipe.yaml --dry-run --output OUT",
        "plan RUN/recipe.yaml",
    ],
)
def test_no_command_runs_a_models_code_by_default(
    run: Path, tmp_path: Path, trace: Path, command: str, capsys: pytest.CaptureFixture
) -> None:
    words = command.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")).split()
    assert run_command(*words) == 2
    said = capsys.readouterr().err
    assert "--trust-remote-code" in said
    assert len(said.splitlines()) == 1
    assert not trace.exists()


@pytest.mark.parametrize("command", ["eval passkey RUN --depths 1 --trials 1", "plan RUN/recipe.yaml"])
def test_trust_remote_code_allows_a_models_code(run: Path, trace: Path, command: str) -> None:
    assert run_command(*command.replace("RUN", str(run)).split(), "--trust-remote-code") == 0
    assert trace.exists()
