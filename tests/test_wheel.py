"""The wheel holds the package and the recipes, and finds them by name outside a checkout."""

import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The content of the wheel, unpacked as pip does it."""
    build = pytest.importorskip("hatchling.build", reason="builds the wheel with hatchling: pip install hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = build.build_wheel(str(folder))
    with ZipFile(folder / name) as wheel:
        wheel.extractall(folder / "installed")
    return folder / "installed"


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_the_wheel_holds_every_file_of_the_package_and_the_recipes(installed: Path) -> None:
    recipes = {f"recipes/{name}": content for name, content in files(ROOT / "recipes").items()}
    assert files(installed / "pi_lora") == {**files(ROOT / "pi_lora"), **recipes}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {path.name for path in installed.iterdir()} == {"pi_lora", f"pi_lora-{version}.dist-info"}


def test_the_wheel_plans_a_recipe_by_its_name(installed: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pi_lora", "plan", "7b_16k"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.startswith("huggyllama/llama-7b: 2048 to 16384 tokens")
