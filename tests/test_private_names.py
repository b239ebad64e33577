"""What the package uses of libraries that they do not promise to keep: docs/design.md lists it, and it exists."""

import ast
import importlib
import inspect
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import pi_lora

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| `([\w-]+)` \| `([\w.]+)` \|", re.MULTILINE)
WORD = re.compile(r"_[a-z]+(_[a-z]+)+")
# Python's own, documented under these names.
DOCUMENTED = {"_exit", "_asdict", "_replace"}


@cache
def listed() -> list[tuple[str, str]]:
    """Each library of the table with the path of a name."""
    return ROW.findall((ROOT / "docs" / "design.md").read_text())


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def ours(trees: list[ast.Module]) -> set[str]:
    """Names that the package defines itself."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)}


def used(source: str, own: set[str]) -> set[str]:
    """Private names of others: imported, read from an object, of a method that is called on super(), or as text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("pi_lora"):
            found |= {alias.name for alias in node.names if private(alias.name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and WORD.fullmatch(node.value):
            found.add(node.value)
        elif isinstance(node, ast.Attribute) and private(node.attr):
            of_super = ast.unparse(node.value).startswith("super(")
            if of_super or (ast.unparse(node.value) not in ("self", "cls") and node.attr not in own):
                found.add(node.attr)
    return found - DOCUMENTED


def test_every_private_name_that_is_used_is_listed() -> None:
    sources = [path.read_text() for path in sorted(Path(pi_lora.__file__).parent.rglob("*.py"))]
    own = ours([ast.parse(source) for source in sources])
    found = set().union(*(used(source, own) for source in sources))
    names = {path.rpartition(".")[2] for _, path in listed()}
    assert found
    assert found == {name for name in names if private(name)}
    assert all(any(re.search(rf"\b{name}\b", source) for source in sources) for name in names)


def test_private_names_are_found() -> None:
    source = "from a import _b; c._d; super()._own; self._f; g._own; h(**{'_i_j': 1, '_k': 2})"
    assert used(source, {"_own"}) == {"_b", "_d", "_own", "_i_j"}


@pytest.mark.parametrize(("library", "path"), listed())
def test_it_exists(library: str, path: str) -> None:
    module, _, name = path.rpartition(".")
    home: Any
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name not in module or missing.name == module.partition(".")[0]:
            pytest.skip(f"pip install {library}")
        folder, _, of_class = module.rpartition(".")
        home = getattr(importlib.import_module(folder), of_class)
    assert hasattr(home, name) or name in inspect.getsource(home)


@pytest.mark.parametrize("library", sorted({library for library, _ in listed()}))
def test_its_library_has_an_upper_bound(library: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = project["dependencies"], *project["optional-dependencies"].values()
    [bounds] = [each for group in groups for each in group if re.match(rf"{library}\b", each)]
    assert re.fullmatch(rf"{library}(\[\w+\])?>=[\w.]+,<[\w.]+", bounds)
