"""Workflows may do no more than they need and run both lanes of the tests, and the site has every page."""

import re
import tomllib
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LEAST = {"contents": "read"}
PUBLISHES = {
    "ci.yml": {"deploy": {"pages": "write", "id-token": "write"}},
    "release.yml": {"publish": {"id-token": "write"}},
}


def read(path: Path) -> Any:
    # BaseLoader: `on` is a key, not a boolean, and 3.10 is a version.
    return yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)


def steps(workflow: Any) -> list[Any]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_read_permissions_unless_they_publish(path: Path) -> None:
    """A token that publishes goes to one job, which runs no code of the repository."""
    workflow = read(path)
    assert workflow["permissions"] == LEAST
    more = {name: job for name, job in workflow["jobs"].items() if "permissions" in job}
    assert {name: job["permissions"] for name, job in more.items()} == PUBLISHES.get(path.name, {})
    assert all("run" not in step for job in more.values() for step in job["steps"])
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", each) for each in used)


def jobs_of(name: str) -> dict[str, Any]:
    """The job of each command that a workflow runs."""
    jobs = read(ROOT / ".github" / "workflows" / name)["jobs"].values()
    return {step["run"]: job for job in jobs for step in job["steps"] if "run" in step}


def test_every_push_runs_both_lanes_and_every_night_all_versions() -> None:
    """The first lane on every Python that the package names."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers))
    on_push = jobs_of("ci.yml")
    assert on_push["make test"]["strategy"]["matrix"]["python"] == pythons
    assert {"make lint", "make test-all", "make docs"} <= on_push.keys()
    assert {"make test-newest", "make test-oldest", "make test-slow"} <= jobs_of("nightly.yml").keys()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("test-all", "test-oldest", "test-newest", "test-slow"):
        assert " --all" in makefile.partition(f"\n{target}:")[2].partition("\n\n")[0], target


def test_the_site_has_every_page() -> None:
    site = read(ROOT / "mkdocs.yml")
    sections = [entry.values() if isinstance(entry, dict) else [entry] for entry in site["nav"]]
    named = [page for values in sections for each in values for page in (each if isinstance(each, list) else [each])]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} | set(
        run_path(str(ROOT / "scripts" / "site.py"))["PAGES"].values()
    )
    assert sorted(named) == sorted(pages)
