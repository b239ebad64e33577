"""The notebook runs from its first cell to its last, in less of everything, and its outputs are kept."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "docs" / "quickstart.ipynb"
CODE = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
LESS = "STEPS, DOCUMENTS, DEPTHS, TRIALS = 2, 1, 1, 1"


def printed(cell: Any) -> str:
    return "".join(text for output in cell["outputs"] for text in output["text"])


def test_the_notebook_runs_and_keeps_its_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it planned is what it plans; of what it measures, the base is lost beyond its window and step 0 is not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    names: dict[str, Any] = {}
    assert any("T4" in "".join(cell["source"]) for cell in CODE)
    for cell in CODE:
        is_parameters = "parameters" in cell["metadata"].get("tags", ())
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(LESS if is_parameters else "".join(cell["source"]), names)
        if "T4" in "".join(cell["source"]):
            assert out.getvalue() == printed(cell)
    assert names["base"][1024] > 2 * names["base"][256]
    assert names["step_0"][1024] < 1.2 * names["step_0"][256]
    assert [depth.k for depth in names["passkey"].depths] == [1024]
    assert names["model"].config.rope_parameters["factor"] == 4
    assert (tmp_path / "models" / "quickstart" / "merge.json").is_file()
