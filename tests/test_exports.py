"""What `import pi_lora` offers: quickly, documented, and the same as the commands."""

import importlib.metadata
import inspect
import subprocess
import sys

import pytest

import pi_lora
from pi_lora import api

FUNCTIONS = [name for name in pi_lora.__all__ if name[0].islower()]
CLASSES = ["Extension", "LoadedModel", "ModelRef", "ModelSource", "PiLoraError", "Recipe", "Run"]


def test_every_export_exists_and_is_documented() -> None:
    assert pi_lora.__version__ == importlib.metadata.version("pi-lora")
    assert pi_lora.__all__ == [*CLASSES, *sorted(FUNCTIONS)]
    assert dir(pi_lora) == sorted([*pi_lora.__all__, "__version__", "errors"])
    assert set(api.__all__) <= set(pi_lora.__all__)
    for name in pi_lora.__all__:
        assert getattr(pi_lora, name).__doc__


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_and_error_of_a_function_is_documented(name: str) -> None:
    text = inspect.getdoc(getattr(pi_lora, name)) or ""
    arguments, raises = text.partition("Args:")[2], text.partition("Raises:")[2]
    parameters = inspect.signature(getattr(pi_lora, name)).parameters
    assert raises or not parameters
    for parameter in parameters:
        assert f"\n    {parameter}: " in arguments, parameter


def test_importing_pi_lora_and_planning_need_no_torch() -> None:
    probe = (
        "import sys, pi_lora\n"
        "assert not {'pydantic', 'torch'} & set(sys.modules)\n"
        "print(pi_lora.plan('7b_16k', gpu='4090').fits)\n"
        "assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("True\n", "")
