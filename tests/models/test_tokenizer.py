"""Tokenizers that do not fit their model, or cannot be read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from random_runs import TOKENIZER

from pi_lora.errors import ModelError
from pi_lora.models.resolve import resolve_model


@pytest.fixture
def folder(small_model: Path, tmp_path: Path) -> Path:
    for name in ("config.json", *TOKENIZER):
        shutil.copy(small_model / name, tmp_path)
    return tmp_path


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder: Path) -> None:
    assert resolve_model(str(folder)).tokenizer
    edit(folder / "config.json", vocab_size=200)
    with pytest.raises(ModelError, match=r"its tokenizer gives token \d+, and the model has 200; use the model's own"):
        assert resolve_model(str(folder)).tokenizer


def test_a_damaged_tokenizer_config_of_an_extended_base_is_refused(folder: Path) -> None:
    """Its tokenizer's longest input is looked at when the model is found."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    edit(folder / "config.json", rope_parameters=rope)
    assert resolve_model(str(folder)).window
    (folder / TOKENIZER[1]).write_bytes(b"{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: is not JSON"):
        resolve_model(str(folder))
