"""The folder of wheels for a GPU machine without network."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import gpu_wheels  # noqa: E402

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
TORCH = gpu_wheels.versions(ROOT / "constraints.txt")["torch"]


def test_removed_libraries_leave_the_wheel_and_its_record(tmp_path: Path) -> None:
    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    libraries = ["a/libbitsandbytes_cuda130.so", "a/libbitsandbytes_cuda118.so", "a/libbitsandbytes_cpu.so"]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in libraries:
            archive.writestr(name, name)
        archive.writestr("a-1.dist-info/RECORD", "".join(f"{name},sha256=0,1\n" for name in libraries))
    gpu_wheels.leave_out_libraries(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.namelist() == [libraries[0], libraries[2], "a-1.dist-info/RECORD"]
        record = archive.read("a-1.dist-info/RECORD").decode()
    assert record == f"{libraries[0]},sha256=0,1\n{libraries[2]},sha256=0,1\n"


@pytest.mark.slow
@pytest.mark.network
def test_the_gpu_benchmark_runs_from_the_tree_and_the_folder_of_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an environment with what such a machine has, on its versions, and with this Python and torch."""
    wheels, site, machine = tmp_path / "wheels", tmp_path / "site", tmp_path / "machine"
    has = gpu_wheels.versions(gpu_wheels.MACHINE)
    monkeypatch.setattr(gpu_wheels, "PYTHON", PYTHON)
    own = gpu_wheels.make(wheels)
    subprocess.run([sys.executable, "-m", "venv", str(machine)], check=True)
    python = str(machine / "bin" / "python")
    # Its numpy has no wheel for the oldest Python that we support.
    fixed = {**own, "torch": TORCH, "numpy": "", **{name: has[name] for name in ("accelerate", "transformers")}}
    there = [f"{name}=={version}" if version else name for name, version in fixed.items()]
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *there], check=True)
    files = map(str, wheels.glob("*.whl"))
    subprocess.run([*install, "--no-index", "--no-deps", "--target", str(site), *files], check=True)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{site}", "HF_HUB_OFFLINE": "1"}
    command = [python, "benchmarks/gpu.py", "--tiny"]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, timeout=400, text=True, stdout=subprocess.PIPE
    )
    assert "transformers 5.23.0" in ended.stdout
