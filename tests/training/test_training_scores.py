"""Scores while a model trains are those of the same model loaded, and measuring changes no weight."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import small_recipe, train
from pi_lora.api import load
from pi_lora.evaluation.measurement import as_json
from pi_lora.evaluation.suite import measure
from pi_lora.model_ref import ModelRef
from pi_lora.models.adapter import prepare_for_tuning
from pi_lora.models.loaded import LoadedModel, load_base
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.evaluation import Evaluation
from pi_lora.recipe.files import load_recipe
from pi_lora.scaling.extension import Extension

EVALUATION = {
    "every": 2,
    "perplexity": {"data": "builtin:stdlib", "windows": [64, 128], "stride": 32, "documents": 1},
    "passkey": {"target": 160, "depths": 2, "trials": 1},
}
LORA, FULL, QLORA = {"rank": 4, "dropout": 0.1}, {"method": "full"}, {"method": "qlora", "rank": 4}
NEEDS_BITSANDBYTES = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed; pip install pi-lora[qlora]"
)
# What steps compute in, whatever the processor would make of `auto`.
CASES = [
    pytest.param(("float32", LORA), id="float32"),
    pytest.param(("bfloat16", LORA), id="bfloat16"),
    pytest.param(("bfloat16", FULL), id="full, bfloat16"),
    pytest.param(("bfloat16", {**QLORA, "modules_to_save": "nothing"}), id="qlora, bfloat16", marks=NEEDS_BITSANDBYTES),
    pytest.param(
        ("bfloat16", {**QLORA, "modules_to_save": "embeddings_and_norms"}),
        id="qlora, all, bfloat16",
        marks=NEEDS_BITSANDBYTES,
    ),
]


@pytest.fixture(scope="module", params=CASES)
def measured_run(request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that computes otherwise while it trains than when it is loaded: under autocast, and with another kernel."""
    precision, tuning = request.param
    recipe = small_recipe(
        small_model,
        model={"name": str(small_model), "attention": "eager"},
        tuning=tuning,
        training={**small_recipe(small_model).training.model_dump(), "precision": precision},
        evaluation=EVALUATION,
    )
    return train(recipe, tmp_path_factory.mktemp("scores") / "run")


def interpolated_base(run: Path) -> LoadedModel:
    """The base of a run as it is at step 0; after QLoRA in four bits."""
    recipe = load_recipe(run / "recipe.yaml").recipe
    if recipe.tuning.method != "qlora":
        return load(ModelRef(recipe.model.name, extension=Extension(128)))
    found = resolve_model(ModelRef(recipe.model.name, extension=Extension(128)))
    model = load_base(found, torch.bfloat16, placement="quantized")
    if recipe.tuning.with_embeddings:  # which compute in float32, the tied head as well
        model = prepare_for_tuning(model, recipe.tuning, found.name)
    return LoadedModel(found, model.eval())


def scores(run: Path, name: str, step: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "scores" / f"{name}-step-{step}.json").read_text())
    assert found["step"] == step
    return found


def test_training_is_measured_at_step_0_at_every_interval_and_at_the_end(measured_run: Path) -> None:
    names = {path.name for path in (measured_run / "scores").iterdir()}
    assert names == {f"{name}-step-{step}.json" for name in ("perplexity", "passkey") for step in (0, 2, 4)}


def test_scores_of_the_first_and_last_step_are_those_of_base_and_run(measured_run: Path) -> None:
    wanted = load_recipe(measured_run / "recipe.yaml").recipe.evaluation
    for step, model in ((0, interpolated_base(measured_run)), (4, load(str(measured_run)))):
        expected, found = as_json(measure(model, wanted)["perplexity"]), scores(measured_run, "perplexity", step)
        perplexities = ([row["perplexity"] for row in each["windows"]] for each in (found, expected))
        assert next(perplexities) == pytest.approx(next(perplexities), rel=1e-6)
        assert (found["dtype"], found["kernel"]) == (expected["dtype"], expected["kernel"])
    assert scores(measured_run, "perplexity", 0)["windows"] != scores(measured_run, "perplexity", 4)["windows"]


def test_float32_weights_are_measured_in_the_arithmetic_of_tuning(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: all weights, which stay float32, in bfloat16 arithmetic while they train and after."""
    training = {**small_recipe(small_model).training.model_dump(), "precision": "bfloat16"}
    recipe = small_recipe(small_model, tuning=FULL, training=training, evaluation=EVALUATION)
    monkeypatch.setattr("pi_lora.models.device.measured_under_autocast", lambda recipe: True)
    monkeypatch.setattr("pi_lora.models.loaded.measured_under_autocast", lambda recipe: True)
    run = train(recipe, tmp_path / "run")
    found, after, in_float32 = (
        [row["perplexity"] for row in each["windows"]]
        for each in (
            scores(run, "perplexity", 4),
            as_json(measure(load(str(run)), recipe.evaluation)["perplexity"]),
            as_json(measure(load(ModelRef(str(run), dtype="float32")), recipe.evaluation)["perplexity"]),
        )
    )
    assert found == pytest.approx(after, rel=1e-6)
    assert found != pytest.approx(in_float32, rel=1e-6)
    assert scores(run, "perplexity", 4)["dtype"] == "float32, computed in bfloat16"


def test_measurements_during_training_do_not_change_the_weights(measured_run: Path, tmp_path: Path) -> None:
    recipe = load_recipe(measured_run / "recipe.yaml").recipe
    undisturbed = train(recipe.model_copy(update={"evaluation": Evaluation()}), tmp_path / "run")
    assert json.loads((undisturbed / "run.json").read_text())["attention"] == "eager"
    expected, found = (load_file(next(run.glob("*.safetensors"))) for run in (undisturbed, measured_run))
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
