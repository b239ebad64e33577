"""What `import pi_lora` offers: quickly, documented, and the same as the commands."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import small_recipe
from test_cli import run

import pi_lora
from pi_lora.errors import RecipeError
from pi_lora.evaluation.measurement import as_json
from pi_lora.recipe.files import dump_recipe

FUNCTIONS = ["evaluate_passkey", "evaluate_perplexity", "generate", "load", "merge", "plan", "train"]


def test_every_export_is_there() -> None:
    assert dir(pi_lora) == pi_lora.__all__ == ["Extension", "Model", "PiLoraError", *FUNCTIONS]
    for name in pi_lora.__all__:
        assert getattr(pi_lora, name).__doc__


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_and_error_of_a_function_is_documented(name: str) -> None:
    text = inspect.getdoc(getattr(pi_lora, name)) or ""
    arguments, raises = text.partition("Args:")[2], text.partition("Raises:")[2]
    assert raises
    for parameter in inspect.signature(getattr(pi_lora, name)).parameters:
        assert f"\n    {parameter}: " in arguments, parameter


def test_importing_it_and_planning_need_no_torch() -> None:
    probe = (
        "import sys, pi_lora\n"
        "assert not {'pydantic', 'torch'} & set(sys.modules)\n"
        "print(pi_lora.plan('7b_16k', gpu='4090').fits)\n"
        "assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_the_functions_do_what_the_commands_do(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(dump_recipe(small_recipe(small_model)))
    steps: list[int] = []
    pi_lora.train("mine", {"training.steps": 1}, output="adapters/one", progress=False)
    assert not capsys.readouterr().err
    made = pi_lora.train("mine", "training.steps=2", progress=lambda done, total, note="": steps.append(total))
    assert (made, steps[-1]) == (Path("adapters/mine"), 2)
    assert pi_lora.merge(made) == Path("models/mine")
    assert str(pi_lora.load("models/mine")) == "models/mine: 128 tokens, scale 2, torch.float32 on cpu"

    perplexity = pi_lora.evaluate_perplexity(str(made), "builtin:stdlib", [64, 128], documents=1)
    passkey = pi_lora.evaluate_passkey(pi_lora.load(str(made)), depths=2, trials=1)
    plan = pi_lora.plan("mine", gpu="cpu")
    options = {
        "perplexity": f"eval perplexity {made} --data builtin:stdlib --windows 64,128 --documents 1".split(),
        "passkey": ["eval", "passkey", str(made), "--depths", "2", "--trials", "1"],
        "plan": ["plan", "mine", "--gpu", "cpu"],
    }
    told = {"perplexity": as_json(perplexity), "passkey": as_json(passkey), "plan": plan.as_json()}
    for name, words in options.items():
        assert run(capsys, monkeypatch, *words, "--json", f"{name}.json")[0] == 0
        written = json.loads(Path(f"{name}.json").read_text())
        assert {key: told[name][key] for key in written} == written


def test_train_starts_no_processes(tmp_path: Path) -> None:
    two = ("hardware.gpus=2", "training.per_device_batch_size=1")
    with pytest.raises(RecipeError, match=r"^hardware: asks for 2 processes; start them with pi-lora train "):
        pi_lora.train("demo", *two, output=tmp_path / "run")
