"""Names of code in the pages below exist: files, modules, functions, classes, recipe keys."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from pi_lora.recipe.schema import Recipe
from sources import PACKAGE, ROOT, nodes_of, tree_of

PAGES = [
    "CONTRIBUTING.md",
    "docs/choosing.md",
    "docs/design.md",
    "docs/experiments.md",
    "docs/start.md",
]
FOLDERS = ["pi_lora", "tests", "scripts"]
# Dotted names that begin so are those of libraries; test_private_names.py checks them.
LIBRARIES = {"accelerate", "datasets", "huggingface_hub", "peft", "torch", "transformers", "trl"}
BACKTICKS = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]*/[\w./-]*|[\w-]+\.(?:py|md|ya?ml|toml|json)")
MAKE = re.compile(r"make ([\w-]+)(?: .*)?")
# A name alone, or with arguments, a value or the keys of a mapping behind it.
NAME = re.compile(r"([A-Za-z_][\w.]*)(\(.*\))?(?:: .*| \{.*\})?")
CODE = re.compile(r"\w*_\w*|[A-Z]+[a-z]\w*|[A-Z]{2,}")


@cache
def files() -> list[Path]:
    """All files but this one, which names what does not exist."""
    found = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file for file in found if file != Path(__file__)]


def names_in(node: ast.AST) -> Iterator[str]:
    """Names that a node of the syntax tree defines, sets, reads as an attribute, or holds as a string."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Constant(value=str(text)):
            yield text


def is_callable(node: ast.AST) -> bool:
    """A function, or a field that holds one."""
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation).startswith("Callable[")
    return isinstance(node, ast.FunctionDef)


@cache
def all_names() -> frozenset[str]:
    return frozenset(name for file in files() for node in nodes_of(file) for name in names_in(node))


@cache
def callables() -> frozenset[str]:
    nodes = (node for file in files() for node in nodes_of(file) if is_callable(node))
    return frozenset(node.target.id if isinstance(node, ast.AnnAssign) else node.name for node in nodes)


def members(body: list[ast.stmt]) -> Iterator[str]:
    """Names that the body of a module or class defines or imports, with the members of its classes."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
                yield from (f"{name}.{member}" for member in members(node.body))
            case ast.Assign(targets=targets):
                yield from map(ast.unparse, targets)
            case ast.AnnAssign(target=target):
                yield ast.unparse(target)
            case ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name for alias in aliases)
            case ast.If(body=inner):  # imports for type checkers alone
                yield from members(inner)


@cache
def dotted_names() -> frozenset[str]:
    """Every module, module.name and Class.member of the package; its rooms in front may be left out."""
    found = set()
    for file in (file for file in files() if file.is_relative_to(PACKAGE)):
        parts = file.relative_to(ROOT).with_suffix("").parts
        module = parts[:-1] if file.name == "__init__.py" else parts
        names = set(members(tree_of(file).body))
        found |= {name for name in names if "." in name}
        for prefix in (".".join(module[start:]) for start in range(len(module))):
            found |= {prefix, *(f"{prefix}.{name}" for name in names)}
    return frozenset(found)


def is_recipe_key(dotted: str) -> bool:
    model: object = Recipe
    for key in dotted.split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel) and key in model.model_fields):
            return False
        model = model.model_fields[key].annotation
    return True


def path_exists(path: str) -> bool:
    """Whether a file or folder is in the tree, in the package, or, without a folder, anywhere or written by name.

    NAME, PACKAGE and MODULE stand for any name.
    """
    pattern = re.sub("NAME|PACKAGE|MODULE", "*", path).rstrip("/")
    if any(next(folder.glob(pattern), None) for folder in (ROOT, PACKAGE)):
        return True
    if "/" in path:
        return False
    homes = [*FOLDERS, "docs", ".github"]
    return path in all_names() or any(next((ROOT / home).rglob(path), None) for home in homes)


def exists(text: str) -> bool:
    """Whether a text in backticks names something that exists, or is not a name of this project's code."""
    if target := MAKE.fullmatch(text):
        return f"\n{target[1]}:" in (ROOT / "Makefile").read_text()
    if PATH.fullmatch(text):
        return path_exists(text)
    found = NAME.fullmatch(text)
    if not found:
        return True
    name, arguments = found[1], found[2]
    if arguments:
        return name.rpartition(".")[2] in callables()
    if "." in name:
        return name.partition(".")[0] in LIBRARIES or name in dotted_names() or is_recipe_key(name)
    return not CODE.fullmatch(name) or name in all_names() | LIBRARIES


@pytest.mark.parametrize("page", PAGES)
def test_names_of_code_in_the_docs_exist(page: str) -> None:
    found = BACKTICKS.findall((ROOT / page).read_text())
    assert found
    assert [text for text in found if not exists(text)] == []


MADE_UP = """
pi_lora/scaling/stretch.py recipes/7b_17k.yaml tests/test_nothing.py scaling_room/ docs/nowhere.md riddles.py
_stretched_rope find_corpus identity() MadeUpModel MADE_UP_NAMES
scaling.config.stretched_rope models.nothing Recipe.stretching training.learning_rat nothing.find
""".split()


def test_made_up_names_are_found_missing() -> None:
    made_up = [*MADE_UP, "make stretch", "find_corpus(source)", "made_up_key: 3"]
    assert [text for text in made_up if exists(text)] == []


def test_existing_names_and_other_text_are_accepted() -> None:
    texts = [
        *"pi_lora/run.py scaling/ run.py config.json tests/scaling/test_NAME.py find_table Table".split(),
        *"scaling.config.read_rope staging.staged Recipe.scaling training.learning_rate transformers.nothing".split(),
        *("make test", "read(columns, seed)", "training.precision: auto", "pi-lora eval NAME MODEL", "window - S"),
    ]
    assert [text for text in texts if not exists(text)] == []
