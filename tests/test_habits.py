"""Workflows name what is there and may do no more than they need; a release has its section in the changelog."""

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LEAST = {"contents": "read"}


def read(path: Path) -> Any:
    # BaseLoader: `on` is a key, not a boolean, and 3.10 is a version.
    return yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)


def steps(workflow: Any) -> list[Any]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_are_a_workflow_for_changes_and_one_for_releases() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_is_there(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = "\n".join(step.get("run", "") for step in steps(read(path)))
    targets, scripts = re.findall(r"make ([\w-]+)", commands), re.findall(r"scripts/[\w.]+", commands)
    assert targets
    assert scripts
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
    if path.name == "ci.yml":
        assert more == {}
    else:
        assert {name: job["permissions"] for name, job in more.items()} == {"publish": {"id-token": "write"}}
        assert all("run" not in step for step in more["publish"]["steps"])
        assert workflow["on"] == {"push": {"tags": ["v*"]}}
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", each) for each in used)


def test_ci_tests_the_pythons_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = read(WORKFLOWS[0])["jobs"]["test"]["strategy"]["matrix"]["python"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert tested == named == ["3.11", "3.12", "3.13"]
    assert project["requires-python"] == f">={tested[0]}"


@pytest.mark.parametrize(
    ("changelog", "tag", "expected"),
    [
        ("## 1.2.0 - 2026-11-22", None, None),
        ("## 1.2.0 - 2026-11-22", "v1.2.0", None),
        ("## 1.2.0 - 2026-11-22", "v1.3.0", "v1.3.0: the version in pyproject.toml is 1.2.0; tag it v1.2.0"),
        ("## Unreleased\n## 1.1.0 - 2026-11-22", "v1.2.0", "CHANGELOG.md: no section for 1.2.0; name what is unrele"),
        ("## 1.2.0", None, "CHANGELOG.md: no section for 1.2.0; name what is unreleased `## 1.2.0 - YYYY-MM-DD`"),
        ("## 1x2.0 - 2026-11-22", None, "CHANGELOG.md: no section for 1.2.0; "),
    ],
)
def test_a_release_has_its_tag_and_section(changelog: str, tag: str | None, expected: str | None) -> None:
    spec = importlib.util.spec_from_file_location("check_version", ROOT / "scripts" / "check_version.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.problem("1.2.0", changelog, tag)
    assert found is None if expected is None else found.startswith(expected)
