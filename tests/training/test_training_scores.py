import json
from pathlib import Path

import pytest
import torch
from conftest import small_recipe, train
from safetensors.torch import load_file

from pi_lora.evaluation.results import PerplexityScores, as_json
from pi_lora.evaluation.suite import measure
from pi_lora.models.load import Stretch, load

EVALUATION = {
    "every": 2,
    "perplexity": {"windows": [64, 128], "stride": 32, "documents": 1},
    "passkey": {"target": 160, "depths": 2, "trials": 1},
}


@pytest.fixture(scope="module")
def measured_run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(small_recipe(small_model, evaluation=EVALUATION), tmp_path_factory.mktemp("scores") / "run")


def scores(run: Path, name: str, step: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "scores" / f"{name}-step-{step}.json").read_text())
    assert found["step"] == step
    return found


def test_it_measures_at_step_0_every_so_many_and_at_the_end(measured_run: Path) -> None:
    names = {path.name for path in (measured_run / "scores").iterdir()}
    assert names == {f"{name}-step-{step}.json" for name in ("perplexity", "passkey") for step in (0, 2, 4)}


def test_step_0_is_the_interpolated_base_and_the_last_step_the_run(measured_run: Path, small_model: Path) -> None:
    wanted = small_recipe(small_model, evaluation=EVALUATION).evaluation
    for step, model in ((0, load(str(small_model), Stretch(128))), (4, load(str(measured_run)))):
        expected = as_json(measure(model, wanted)["perplexity"])["windows"]
        found = scores(measured_run, "perplexity", step)["windows"]
        assert [row["perplexity"] for row in found] == pytest.approx([row["perplexity"] for row in expected], rel=1e-4)
    assert scores(measured_run, "perplexity", 0)["windows"] != scores(measured_run, "perplexity", 4)["windows"]


def test_measuring_changes_nothing_in_the_training(measured_run: Path, lora_run: Path) -> None:
    undisturbed = load_file(lora_run / "adapter_model.safetensors")
    for name, tensor in load_file(measured_run / "adapter_model.safetensors").items():
        assert torch.equal(tensor, undisturbed[name]), name


def test_what_is_not_said_follows_from_the_window(small_model: Path) -> None:
    loaded = load(str(small_model), Stretch(512))
    wanted = small_recipe(small_model, evaluation={"perplexity": {"documents": 1}}).evaluation
    found = measure(loaded, wanted)
    assert set(found) == {"perplexity"}
    assert isinstance(found["perplexity"], PerplexityScores)
    assert [row.window for row in found["perplexity"].windows] == [256, 512]
    assert found["perplexity"].stride == 128
