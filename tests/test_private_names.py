"""What the package uses of libraries that they do not promise to keep, and what it patches in them: few, and listed in
docs/design.md with the reason.
"""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pi_lora

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| `([\w-]+)` \| `([\w.]+)` \|", re.MULTILINE)
LISTED: list[tuple[str, str]] = ROW.findall((ROOT / "docs" / "design.md").read_text())
MOST = 12
WORD = re.compile(r"_[a-z]+(_[a-z]+)+")
# Python's own, documented under these names.
DOCUMENTED = {"_exit", "_asdict", "_replace"}
PATCHERS = {"setattr", "patch", "patch.object"}
# Methods of models that are replaced on an object.
METHODS = {"forward", "tie_weights", "save_pretrained", "apply_chat_template", "generate", "__call__"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(trees: list[ast.Module]) -> set[str]:
    """Names that the package defines itself."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)}


def libraries(tree: ast.Module) -> set[str]:
    """Names that a file imports from elsewhere than the package."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("pi_lora"):
            found |= {alias.asname or alias.name for alias in node.names}
    return found - {"pi_lora"}


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Private names of others: imported, read from an object, of a method that is called on super(), or as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("pi_lora"):
            yield from (alias.name for alias in node.names if private(alias.name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and WORD.fullmatch(node.value):
            yield node.value
        elif isinstance(node, ast.Attribute) and private(node.attr):
            of_super = ast.unparse(node.value).startswith("super(")
            if of_super or (ast.unparse(node.value) not in ("self", "cls") and node.attr not in own):
                yield node.attr


def patches(tree: ast.Module) -> Iterator[str]:
    """Names of what is replaced in a library: an attribute of what is imported, or set by name, or a model's method."""
    imported = libraries(tree)
    for node in ast.walk(tree):
        by_name = isinstance(node, ast.Call) and ast.unparse(node.func) in PATCHERS
        if by_name and ast.unparse(node.args[0]).partition(".")[0] in imported:
            yield ast.unparse(node.args[1])
        assigned = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in (part for each in assigned for part in getattr(each, "elts", [each])):
            if isinstance(target, ast.Attribute):
                root = ast.unparse(target.value).partition(".")[0]
                if root in imported or (root not in ("self", "cls") and target.attr in METHODS):
                    yield target.attr


def test_private_and_patched_names_of_libraries_are_listed() -> None:
    trees = [ast.parse(path.read_text()) for path in sorted(Path(pi_lora.__file__).parent.rglob("*.py"))]
    own = own_names(trees)
    found = {name for tree in trees for name in (*private_names(tree, own), *patches(tree))} - DOCUMENTED
    listed = {path.rpartition(".")[2] for _, path in LISTED}
    assert found
    assert found <= listed
    assert len(LISTED) <= MOST
    sources = "".join(map(ast.unparse, trees))
    assert [name for name in listed if not re.search(rf"\b{name}\b", sources)] == []


def test_private_and_patched_names_are_detected() -> None:
    source = "from a import _b, C\nc._d; super()._own; self._f; g._own; h(**{'_i_j': 1, '_k': 2})"
    assert {*private_names(ast.parse(source), {"_own"})} == {"_b", "_d", "_own", "_i_j"}
    source = "import a\nfrom b import C\nimport pi_lora\na.x.y = 1\nC.m, d = 1, 2\nsetattr(a.e, 'n', 1)\n"
    source += "model.forward = f\nself.forward = g\npi_lora.z = 1\nrow.value = 2"
    assert {*patches(ast.parse(source))} == {"y", "m", "'n'", "forward"}


@pytest.mark.parametrize(("library", "path"), LISTED)
def test_every_listed_private_name_exists(library: str, path: str) -> None:
    pytest.importorskip(library, reason=f"pip install {library}")
    owner, _, name = path.rpartition(".")
    home = pkgutil.resolve_name(owner)
    assert hasattr(home, name) or name in inspect.getsource(home)
