"""A merge that is killed, and two at once."""

from pathlib import Path

import pytest
from random_runs import save_run


@pytest.fixture(scope="module")
def run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(small_model, tmp_path_factory.mktemp("merges") / "run", r=4, target_modules="all-linear")
