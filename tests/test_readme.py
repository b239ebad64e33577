"""The README's commands exist, its files are there, and its recipe is one."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from pi_lora.cli import app
from pi_lora.recipe.files import load_recipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, ROOT / "recipes" / "README.md", *sorted((ROOT / "pi_lora").rglob("README.md"))]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    lines = [line.strip().partition("#")[0].strip() for page in PAGES for line in page.read_text().splitlines()]
    return sorted({line.removeprefix(".venv/bin/") for line in lines if re.match(r"(\.venv/bin/)?pi-lora \w", line)})


def test_there_are_commands() -> None:
    assert len(commands()) > 5


@pytest.mark.parametrize("line", commands())
def test_every_command_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each documented command, down to its options, is one that the command line takes; recipes resolve."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    command = get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    given = command.make_context(command.name, words).params
    if "recipe" in given:
        load_recipe(given["recipe"], given["overrides"] or [])


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    """Files and pictures that pages link are there, and so are the headings that a link names after `#`."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, heading = target.partition("#")
        if target.startswith("http"):
            continue
        assert (page.parent / name).exists(), target
        if heading:
            assert heading in anchors(page.parent / name if name else page), target


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_the_repository_are_named_as_they_are(page: Path) -> None:
    """Those in code style; a name in capitals stands for any."""
    folders, kinds = "tests|scripts|benchmarks|recipes|pi_lora", "py|yaml|sh|json"
    named = re.findall(rf"(?:{folders})/[\w/.-]+\.(?:{kinds})\b", page.read_text())
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []


def anchors(page: Path) -> set[str]:
    """What headings are called in links: small letters, without punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_of_docs_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop().resolve()
        if page.suffix == ".md" and page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
            ahead += [page.parent / link for link in links if not link.startswith("http")]
    assert set((ROOT / "docs").glob("*.md")) <= reached


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"^    make ([\w-]+)", page.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_readmes_recipe_resolves(tmp_path: Path) -> None:
    yaml = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert yaml
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.group(1))
    assert load_recipe(path).recipe.context.target == 8192


def test_the_map_names_what_is_there() -> None:
    for name in re.findall(r"^\| `([\w./]+)`", README, re.MULTILINE):
        assert (ROOT / name).exists(), name


def test_the_functions_that_the_design_names_are_there() -> None:
    text = (ROOT / "docs" / "design.md").read_text().partition("## One object per stage")[2].partition("## Rules")[0]
    named = [name for name in re.findall(r"`([a-z_]+(?:\.\w+)+)`", text) if not name.endswith((".py", ".json"))]
    assert len(named) > 15
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(f"pi_lora.{module}"), attribute), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_placeholder_is_left(page: Path) -> None:
    assert not re.search(r"@[A-Z]+@", page.read_text())
