"""No figure of a plan or of a new recipe changes unseen. Other tests say that they are right."""

import json

import plan_figures
import pytest

RECORDED = dict(map(json.loads, plan_figures.FILE.read_text().splitlines()))
CASES = dict(plan_figures.cases())


def test_every_case_is_recorded() -> None:
    assert list(RECORDED) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_figures_are_those_of_the_file(name: str) -> None:
    """If a change is meant, `python tests/planning/plan_figures.py` writes the file again; read what differs."""
    expected = RECORDED[name]
    found = json.loads(json.dumps(CASES[name]()))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value == (pytest.approx(expected[key], rel=1e-9) if key in ("flops", "hours") else expected[key]), key
