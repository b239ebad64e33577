"""Workflows name what is there and may do no more than they need; a release has its section in the changelog; the site
has every page, and links that lead somewhere.
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LEAST = {"contents": "read"}


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> Any:
    # BaseLoader: `on` is a key, not a boolean, and 3.10 is a version.
    return yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)


def steps(workflow: Any) -> list[Any]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_is_there(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = "\n".join(step.get("run", "") for step in steps(read(path)))
    targets, scripts = re.findall(r"make ([\w-]+)", commands), re.findall(r"scripts/[\w.]+", commands)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for script in scripts:
        assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_reads_unless_it_publishes(path: Path) -> None:
    """The token that publishes goes to one job, which runs no code of the repository."""
    workflow = read(path)
    assert workflow["permissions"] == LEAST
    more = {name: job for name, job in workflow["jobs"].items() if "permissions" in job}
    if path.name != "release.yml":
        assert more == {}
    else:
        assert {name: job["permissions"] for name, job in more.items()} == {"publish": {"id-token": "write"}}
        assert all("run" not in step for step in more["publish"]["steps"])
        assert workflow["on"] == {"push": {"tags": ["v*"]}}
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", each) for each in used)


@pytest.mark.parametrize(
    ("changelog", "tag", "expected"),
    [
        ("## 1.2.0 - 2026-11-22", None, None),
        ("## 1.2.0 - 2026-11-22", "v1.2.0", None),
        ("## 1.2.0 - 2026-11-22", "v1.3.0", "v1.3.0: the version in pyproject.toml is 1.2.0; tag it v1.2.0"),
        ("## Unreleased\n## 1.1.0 - 2026-11-22", "v1.2.0", "CHANGELOG.md: no section for 1.2.0; name what is unrele"),
    ],
)
def test_a_release_has_its_tag_and_section(changelog: str, tag: str | None, expected: str | None) -> None:
    found = script("check_version").problem("1.2.0", changelog, tag)
    assert found is None if expected is None else found.startswith(expected)


def test_the_site_has_every_page() -> None:
    site = read(ROOT / "mkdocs.yml")
    sections = [entry.values() if isinstance(entry, dict) else [entry] for entry in site["nav"]]
    named = [page for values in sections for each in values for page in (each if isinstance(each, list) else [each])]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | set(script("site").PAGES.values())
    assert sorted(named) == sorted(pages)


def test_links_of_the_site_lead_to_its_pages() -> None:
    """One folder holds all pages; what has none keeps its text."""
    readme = "[a](docs/models.md#gemma) ![b](docs/demo.png) [c](recipes/README.md) [d](LICENSE) [e](https://a.b)"
    expected = "[a](models.md#gemma) ![b](demo.png) [c](list-of-recipes.md) d [e](https://a.b)"
    assert script("site").links_fitted(readme, ROOT / "README.md") == expected
    page = "[a](../README.md) [b](theory.md) [c](../benchmarks/gpu.py)"
    assert script("site").links_fitted(page, ROOT / "docs" / "a.md") == "[a](index.md) [b](theory.md) c"


def test_a_notebook_is_a_page_with_what_it_printed() -> None:
    printed = [
        {"output_type": "stream", "text": ["3\n"]},
        {"output_type": "execute_result", "data": {"text/plain": "4"}},
    ]
    cells = [{"cell_type": "markdown", "source": ["# A"]}, {"cell_type": "code", "source": "1 + 2", "outputs": printed}]
    expected = "# A\n\n```python\n1 + 2\n```\n\n```text\n3\n```\n\n```text\n4\n```\n"
    assert script("site").notebook_as_markdown(json.dumps({"cells": cells})) == expected
