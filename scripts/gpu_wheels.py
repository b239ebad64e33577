"""Make a folder of wheels for a GPU machine without network: what pi-lora needs and that machine lacks.

    python scripts/gpu_wheels.py [FOLDER]          # wheels/; here, then on that machine:
    python3 -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl
    PYTHONPATH=$PWD:/tmp/site python3 benchmarks/gpu.py --minutes 9

scripts/gpu_machine.txt is the `pip freeze` of that machine; torch is always the machine's own. The wheels are those of
constraints.txt for Python 3.12 and Linux on x86_64, with the extras for QLoRA and Liger's kernels. bitsandbytes comes
with its libraries for CUDA 13.0 and for CPUs alone.
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from arguments import parser_of

ROOT = Path(__file__).parent.parent
MACHINE = ROOT / "scripts" / "gpu_machine.txt"
PYTHON = "3.12"
EXTRAS = ("qlora", "liger")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")
KEPT_LIBRARIES = ("libbitsandbytes_cuda130.so", "libbitsandbytes_cpu.so")


def versions(file: Path) -> dict[str, str]:
    """Package to version, empty where the file has only the name."""
    pins: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        requirement, _, _comment = line.partition("#")
        name, _, version = requirement.strip().partition("==")
        if name:
            pins[canonicalize_name(name)] = version
    return pins


def fill(folder: Path) -> dict[str, str]:
    """Put the wheels into `folder`; return what is left to the machine, package to version."""
    wanted = project_requirements()
    pins = versions(ROOT / "constraints.txt")
    machine = versions(MACHINE)
    seen: set[str] = set()
    own: dict[str, str] = {}
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate(environment()):
            continue
        # Empty: any version will do.
        version = machine.get(name)
        if name == "torch" or version == "" or (version and requirement.specifier.contains(version)):
            own[name] = machine[name]
        elif name not in seen:
            seen.add(name)
            print(f"  {name}", flush=True)
            pinned = f"{name}=={pins[name]}" if name in pins else str(requirement)
            wheel = download(folder, pinned)
            wanted += requirements_of(wheel)
    return own


def project_requirements() -> list[Requirement]:
    """The dependencies of pi-lora and of the extras."""
    content = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(content)["project"]
    names = list(project["dependencies"])
    for extra in EXTRAS:
        names += project["optional-dependencies"][extra]
    return [Requirement(name) for name in names]


def environment() -> dict[str, str]:
    """The markers of that machine."""
    return {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "python_version": PYTHON,
        "python_full_version": f"{PYTHON}.0",
    }


def download(folder: Path, requirement: str) -> Path:
    """Fetch the wheel of one package, and return its file."""
    options = f"--no-deps --only-binary=:all: --implementation cp --python-version {PYTHON}".split()
    options += [f"--platform={platform}" for platform in PLATFORMS]
    before = set(folder.iterdir())
    pip(["download", *options, "--dest", str(folder), requirement])
    added = set(folder.iterdir()) - before
    return next(iter(added))


def pip(words: list[str]) -> None:
    """Run pip, quietly."""
    subprocess.run([sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"], check=True)


def requirements_of(wheel: Path) -> list[Requirement]:
    """The requirements of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(file for file in archive.namelist() if file.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(name), validate=False)
    return metadata.requires_dist or []


def leave_out_libraries(wheel: Path) -> None:
    """Drop the libraries of a wheel that the machine does not need, and their lines in its record."""
    smaller = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if is_needed(line.split(",")[0])).encode()
            if is_needed(entry.filename):
                new.writestr(entry, content)
    smaller.replace(wheel)


def is_needed(name: str) -> bool:
    """Whether a file of bitsandbytes is needed on that machine."""
    return not name.endswith(".so") or name.endswith(KEPT_LIBRARIES)


def make(folder: Path) -> dict[str, str]:
    """Make the folder anew; return what is left to the machine."""
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        part = Path(temporary) / "wheels"
        part.mkdir()
        own = fill(part)
        # For the metadata: the package itself is in the tree, which comes first.
        pip(["wheel", "--no-deps", "--wheel-dir", str(part), str(ROOT)])
        leave_out_libraries(next(part.glob("bitsandbytes-*")))
        part.rename(folder)
    return own


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "wheels")
    folder = parser.parse_args().folder
    make(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
