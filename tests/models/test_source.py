"""What a run knows of its texts, its window and its arithmetic goes with it: merged, extended, tuned further, and read
from the hub.
"""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import small_recipe, train
from pi_lora.api import extend, load, merge
from pi_lora.data.sources import trains_on
from pi_lora.evaluation.perplexity import Perplexity
from pi_lora.evaluation.suite import evaluate
from pi_lora.model_ref import ModelRef
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.data import Source
from pi_lora.recipe.evaluation import PerplexityOptions
from pi_lora.report.card import card_of
from pi_lora.report.scores import MeasuredRun
from pi_lora.scaling.extension import Extension
from random_runs import put_on_hub, save_run

MEASURED = {"windows": (32,), "stride": 32, "documents": 1}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    file.write_text("".join(f"The lamp of cabin {number} burns low.\n" for number in range(300)))
    return file


@pytest.fixture(scope="module")
def tuned(small_model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run of `direct`, whose config does not tell L, on a text whose end is held out."""

    def run(name: str, base: Path = small_model, **changes: Any) -> Path:
        data = {"source": {"name": str(text), "hold_out": 0.2}}
        recipe = small_recipe(base, **{"scaling": "direct", "data": data, **changes})
        return train(recipe, tmp_path_factory.mktemp("tuned") / name)

    return run


@pytest.fixture(scope="module")
def adapter(tuned: Callable[..., Path]) -> Path:
    return tuned("adapter")


@pytest.fixture(scope="module")
def merged(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge(adapter, tmp_path_factory.mktemp("merged") / "model").folder


def held_out(model: ModelRef | str | Path, text: Path) -> float | None:
    """The share of the text that a model is measured on by default."""
    options = PerplexityOptions(data=str(text), **MEASURED)
    return Perplexity().prepare(options, [resolve_model(model)]).hold_out


def test_merged_weights_know_what_the_run_knew(
    adapter: Path, merged: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Path(shutil.copytree(merged, tmp_path / "moved"))
    put_on_hub(merged, "me/merged", tmp_path / "hub", monkeypatch)
    run = resolve_model(adapter)
    for name in (merged, moved, "me/merged"):
        source = resolve_model(name)
        assert (source.original, source.window) == (run.original, run.window) == (64, 128)
        assert source.recipe == run.recipe
        assert held_out(name, text) == 0.2
        assert held_out(ModelRef(name, extension=Extension(256)), text) == 0.2
    for share, is_marked in ((0.2, False), (0.5, True)):
        options = PerplexityOptions(data=str(text), hold_out=share, **MEASURED)
        [scores] = evaluate([resolve_model(moved)], {"perplexity": options}, {})["perplexity"]
        assert scores.tuned_on == is_marked
    facts = json.loads((merged / "run.json").read_text())
    assert facts["loss"] == json.loads((adapter / "run.json").read_text())["loss"]


def test_a_full_run_on_the_hub_knows_its_recipe(
    full_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_hub(full_run, "me/full", tmp_path / "hub", monkeypatch)
    pushed, local = resolve_model("me/full"), resolve_model(full_run)
    assert pushed.recipe == local.recipe
    assert pushed.recipe
    assert pushed.original == local.original == 64
    assert pushed.texts == local.texts


def test_a_model_that_is_made_from_a_run_knows_its_texts(
    merged: Path, text: Path, tuned: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extended, tuned further by name of the hub, and an adapter of another tool."""
    put_on_hub(merged, "me/merged", tmp_path / "hub", monkeypatch)
    extension = Extension(256, scaling="direct")
    extended = extend(ModelRef(merged, extension=extension), tmp_path / "extended")
    assert resolve_model(extended).original == 128
    other_text = tmp_path / "other.txt"
    other_text.write_text("The door of the cabin is open, and the road is long. " * 300)
    others = {"data": {"source": str(other_text)}, "context": {"target": 256}}
    further = tuned("further", Path("me/merged"), **others)
    full = tuned("full", Path("me/merged"), tuning={"method": "full"}, **others)
    foreign = save_run(merged, tmp_path / "foreign", r=2, target_modules=["q_proj"])
    again = merge(foreign, tmp_path / "again").folder
    for model in (extended, further, full, foreign, again):
        texts = resolve_model(model).texts
        assert trains_on(texts, Source(name=str(text))), model
        assert not trains_on(texts, Source(name=str(text), hold_out=0.2)), model


def test_the_file_of_a_merge_names_folders_wherever_it_is_read(
    adapter: Path, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(adapter.parent)
    folder = merge(adapter.name, tmp_path / "merged").folder
    assert json.loads((folder / "merge.json").read_text()) | {"checks": []} == {
        "base": str(small_model.resolve()),
        "run": str(adapter.resolve()),
        "checks": [],
    }
    monkeypatch.chdir(tmp_path)
    before = (folder / "README.md").read_text()
    after = card_of(MeasuredRun(folder))
    for line in ("base and adapter added in float32", "- checked: 14 tensors", "AutoModelForCausalLM.from_pretrained"):
        assert line in before
        assert line in after
    assert "PeftModel" not in after


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_is_measured_in_the_dtypes_of_its_training_on_any_machine(
    dtype: str, tuned: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this machine would choose for `auto`."""
    monkeypatch.setattr("pi_lora.models.device.has_fast_bfloat16", lambda: dtype == "bfloat16")
    run = tuned("quantized", tuning={"method": "qlora", "rank": 2})
    monkeypatch.setattr("pi_lora.models.device.has_fast_bfloat16", lambda: dtype == "float32")
    assert load(run).dtype == dtype
    assert load(ModelRef(run, dtype="float16")).dtype == "float16"
    recipe = resolve_model(run).recipe
    assert recipe
    assert recipe.training.precision == dtype


def test_the_dtype_of_a_recipe_is_that_of_its_measurements(tuned: Callable[..., Path], small_model: Path) -> None:
    run = tuned("bfloat16", model={"name": str(small_model), "dtype": "bfloat16"})
    assert load(run).dtype == "bfloat16"
