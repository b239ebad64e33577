"""The notebook runs from its first cell to its last, in less of everything, and its outputs are kept."""

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from pi_lora.scaling.rope import Rope

NOTEBOOK = Path(__file__).parent.parent / "docs" / "quickstart.ipynb"
CODE = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
LESS = "STEPS, DOCUMENTS, TOKENS, DEPTHS, TRIALS = 2, 1, 1024, 4, 1"
PNG_BEGINS = base64.b64encode(b"\x89PNG\r\n\x1a\n")[:10].decode()


def printed(cell: Any) -> str:
    return "".join(text for output in cell["outputs"] for text in output["text"])


def test_the_notebook_runs_and_keeps_its_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it planned is what it plans. It measures, draws, and writes a merged model with the scaling of the probe."""
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
    assert list(names["comparison"].verdict) == ["Reads", "Finds", "Compared with no tuning", "Short inputs"]
    assert names["run"].log[-1]["step"] == 2
    config = json.loads((tmp_path / "models" / "notebook" / "config.json").read_text())
    assert Rope(config).method == names["probed"].best
    assert {file.name for file in (tmp_path / "adapters/notebook/pictures").iterdir()} >= {
        "perplexity.png",
        "passkey.png",
    }


def test_the_notebook_holds_its_pictures() -> None:
    pictures = [output["data"]["image/png"] for cell in CODE for output in cell["outputs"] if "data" in output]
    assert len(pictures) == 2
    assert all(picture.startswith(PNG_BEGINS) for picture in pictures)
