"""What the package uses of libraries that they do not promise to keep, and what it patches in them: few, and listed in
docs/design.md with the reason.
"""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator

import pytest

from sources import PACKAGE, ROOT, nodes_of

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


Nodes = Iterable[ast.AST]


def own_names(files: Iterable[Nodes]) -> set[str]:
    """Names that the package defines itself."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for nodes in files for node in nodes if isinstance(node, kinds)}


def libraries(nodes: Nodes) -> set[str]:
    """Names that a file imports from elsewhere than the package."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("pi_lora"):
            found |= {alias.asname or alias.name for alias in node.names}
    return found - {"pi_lora"}


def private_names(nodes: Nodes, own: set[str]) -> Iterator[str]:
    """Private names of others: imported, read from an object, of a method that is called on super(), or as text."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("pi_lora"):
            yield from (alias.name for alias in node.names if private(alias.name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and WORD.fullmatch(node.value):
            yield node.value
        elif isinstance(node, ast.Attribute) and private(node.attr):
            of_super = ast.unparse(node.value).startswith("super(")
            if of_super or (ast.unparse(node.value) not in ("self", "cls") and node.attr not in own):
                yield node.attr


def patches(nodes: Nodes) -> Iterator[str]:
    """Names of what is replaced in a library: an attribute of what is imported, or set by name, or a model's method."""
    imported = libraries(nodes)
    for node in nodes:
        by_name = isinstance(node, ast.Call) and ast.unparse(node.func) in PATCHERS
        if by_name and ast.unparse(node.args[0]).partition(".")[0] in imported:
            yield ast.unparse(node.args[1])
        assigned = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in (part for each in assigned for part in getattr(each, "elts", [each])):
            if isinstance(target, ast.Attribute):
                root = ast.unparse(target.value).partition(".")[0]
                if root in imported or (root not in ("self", "cls") and target.attr in METHODS):
                    yield target.attr


def names_in(node: ast.AST) -> Iterator[str]:
    """Names that a node reads, imports, defines or holds as text."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name) | ast.FunctionDef(name=name):
            yield name
        case ast.Constant(value=str(text)):
            yield from text.split(".")


def test_private_and_patched_names_of_libraries_are_listed() -> None:
    files = [nodes_of(path) for path in sorted(PACKAGE.rglob("*.py"))]
    own = own_names(files)
    found = {name for nodes in files for name in (*private_names(nodes, own), *patches(nodes))} - DOCUMENTED
    listed = {path.rpartition(".")[2] for _, path in LISTED}
    assert found
    assert found <= listed
    assert len(LISTED) <= MOST
    used = {name for nodes in files for node in nodes for name in names_in(node)}
    assert listed - used == set()


def nodes_in(source: str) -> list[ast.AST]:
    return [*ast.walk(ast.parse(source))]


def test_private_and_patched_names_are_detected() -> None:
    source = "from a import _b, C\nc._d; super()._own; self._f; g._own; h(**{'_i_j': 1, '_k': 2})"
    assert {*private_names(nodes_in(source), {"_own"})} == {"_b", "_d", "_own", "_i_j"}
    source = "import a\nfrom b import C\nimport pi_lora\na.x.y = 1\nC.m, d = 1, 2\nsetattr(a.e, 'n', 1)\n"
    source += "model.forward = f\nself.forward = g\npi_lora.z = 1\nrow.value = 2"
    assert {*patches(nodes_in(source))} == {"y", "m", "'n'", "forward"}


@pytest.mark.parametrize(("library", "path"), LISTED)
def test_every_listed_private_name_exists(library: str, path: str) -> None:
    pytest.importorskip(library, reason=f"pip install {library}")
    owner, _, name = path.rpartition(".")
    home = pkgutil.resolve_name(owner)
    assert hasattr(home, name) or name in inspect.getsource(home)
