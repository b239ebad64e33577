"""The layers of docs/design.md: a file imports only from layers below its own."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from sources import PACKAGE, ROOT, nodes_of, tree_of

FLOORS = {
    "errors": 0,
    "types": 0,
    "storage": 1,
    "drawing": 1,
    "hub": 1,
    "scaling": 1,
    "recipe": 2,
    "distributed": 3,
    "model_ref": 3,
    "run": 3,
    "staging": 4,
    "terminal": 5,
    "models": 5,
    "data": 5,
    "theory": 5,
    "planning": 6,
    "serving": 8,
    "evaluation": 7,
    "merging": 7,
    "report": 8,
    "training": 8,
    "preflight": 8,
    "api": 9,
    "cli": 10,
    "__main__": 11,
}
HOMES = {
    "trl": {"training/trainer.py"},
    "peft": {"models/adapter.py"},
    "datasets": {"data"},
    "matplotlib": {"drawing.py"},
    "lm_eval": {"evaluation/harness.py"},
    "cyclopts": {"cli"},
}
# The package's own door re-exports; it belongs to no floor.
DOOR = PACKAGE / "__init__.py"


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != DOOR]


def place(path: Path) -> str:
    """The file or package directly below `pi_lora` that a source belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@cache
def imports(path: Path, at_once: bool = False) -> frozenset[str]:
    """The modules that a file imports anywhere, or `at_once` when it is imported itself."""
    found = set()
    for node in tree_of(path).body if at_once else nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = str(node.module)
            # `from pi_lora.models import device as devices` imports a module.
            below = {f"{module}.{alias.name}" for alias in node.names}
            found |= {each for each in below if is_module(each)} or {module}
    return frozenset(found)


def test_every_file_has_a_floor() -> None:
    assert {place(path) for path in sources()} == set(FLOORS)


def test_files_import_only_from_lower_floors() -> None:
    for path in sources():
        rooms = {name.split(".")[1] for name in imports(path) if name.startswith("pi_lora.")} - {place(path)}
        upward = [room for room in rooms if FLOORS[room] >= FLOORS[place(path)]]
        assert upward == [], path


def test_packages_have_no_import_circles() -> None:
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): {
            name for name in imports(path) if name.startswith("pi_lora.")
        }
        for path in sources()
    }

    # A circle raises CycleError, which names it.
    assert set(graph) <= {*TopologicalSorter(graph).static_order()}


def test_each_large_library_has_one_home() -> None:
    for library, home in HOMES.items():
        users = [path for path in sources() if any(n.split(".")[0] == library for n in imports(path))]
        at_home = [path for path in users if any((PACKAGE / each) in (path, *path.parents) for each in home)]
        assert users == at_home != [], library


def test_recipes_and_configs_need_no_torch() -> None:
    light = [path for path in sources() if place(path) in {"errors", "types", "storage", "recipe"}]
    light += [PACKAGE / "scaling" / f"{name}.py" for name in ("config", "extension", "model_types", "rope", "scalings")]
    for path in light:
        assert not {n.split(".")[0] for n in imports(path)} & {"torch", "transformers", "numpy"}, path


def test_a_merge_imports_no_library_that_it_does_not_need() -> None:
    """Of its memory, nine tenths are libraries; that of `datasets` alone was a fifth."""
    waiting, found = ["pi_lora.merging.merging"], set()
    while waiting:
        path = ROOT / waiting.pop().replace(".", "/")
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        new = imports(path, at_once=True) - found
        found |= new
        waiting += [name for name in new if name.startswith("pi_lora.")]
    assert not {name.split(".")[0] for name in found} & {*HOMES, "pyarrow", "bitsandbytes", "scipy"}


def test_commands_call_the_api_alone() -> None:
    """A command parses, calls one function of `pi_lora.api`, and prints."""
    allowed = {"api", "cli", "distributed", "errors", "model_ref", "recipe", "scaling", "storage", "terminal", "types"}
    for path in sources():
        if place(path) == "cli":
            rooms = {name.split(".")[1] for name in imports(path) if name.startswith("pi_lora.")}
            assert rooms <= allowed, path


def test_scripts_have_no_import_circles() -> None:
    files = {
        ".".join(path.relative_to(folder).with_suffix("").parts): path
        for folder in (ROOT / "benchmarks", ROOT / "scripts")
        for path in folder.rglob("*.py")
    }
    assert {"tables", "gpu_jobs", "pages"} <= files.keys()
    graph = {name: imports(path) & files.keys() for name, path in files.items()}

    def reached_from(start: str, seen: frozenset[str] = frozenset()) -> set[str]:
        new = graph[start] - seen
        return new.union(*(reached_from(name, seen | new) for name in new))

    assert [name for name in graph if name in reached_from(name)] == []
