"""Data that is prepared ahead of training: elsewhere, once."""

from pathlib import Path

import pytest

from conftest import run_command, small_recipe
from hub import Hub
from pi_lora.data.examples import data_problems
from pi_lora.preflight import check_data
from pi_lora.recipe.files import dump_recipe
from pi_lora.training.job import pack_data


def never(done: int, total: int, note: str = "") -> None:
    pytest.fail(f"{total} tokens are packed again")


def test_data_of_a_gpu_recipe_is_prepared_without_gpus_and_read_by_training(
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PI_LORA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    for file in small_model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    recipe = small_recipe(folder, hardware={"gpus": 8}, training={"steps": 2, "global_batch_size": 8})
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    assert run_command("prepare", str(file)) == 0
    said = capsys.readouterr().out
    assert "16 sequences of at most 128 tokens" in said
    assert f"{tmp_path / 'cache'}: has the data of {file}" in said
    assert len(pack_data(recipe, check_data(recipe), never).rows) == 16


def test_a_data_set_on_the_hub_is_not_streamed_before_it_is_prepared(small_model: Path, hub: Hub) -> None:
    """`prepare` reads all of it at once; `train --dry-run`, which reads nothing else, looks at its first rows."""
    recipe = small_recipe(small_model, data={"source": "people/books"})
    assert check_data(recipe).name == str(small_model)
    assert hub.log == []
    [problem] = data_problems(recipe.data, ask_hub=True)
    assert problem.startswith("data.source: people/books: ")
