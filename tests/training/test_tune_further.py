"""An extended model as the model of a recipe: a run, an adapter or merged weights, with its scaling on."""

import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import plan_of, refused, small_recipe, train
from pi_lora.api import load, merge
from pi_lora.errors import Interrupted, PiLoraError
from pi_lora.models.resolve import resolve_for_training
from pi_lora.planning.gpus import device_here
from pi_lora.recipe.schema import Recipe
from pi_lora.training.job import load_for_tuning

ROWS = [{"text": "The cat sat on the mat. " * 3, "gist": f"Cat {number}."} for number in range(4)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def further(base: Path, rows: Path, **changes: Any) -> Recipe:
    data = {"source": str(rows), "document": "text", "summary": "gist", "completion_tokens": 20, "epochs": 4}
    return small_recipe(base, **{"scaling": "keep", "data": data, **changes})


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in load(str(run)).module.named_parameters()}


def logits(run: Path) -> torch.Tensor:
    loaded = load(str(run))
    with torch.no_grad():
        found: torch.Tensor = loaded.module(torch.arange(100)[None] + 5).logits
    return found


def test_an_adapter_is_tuned_further_as_one_adapter_of_its_base(lora_run: Path, rows: Path, tmp_path: Path) -> None:
    recipe = further(lora_run, rows)
    assert plan_of(recipe, device_here()).model.original == 128
    run = train(recipe, tmp_path / "further")
    first, second = (json.loads((each / "adapter_config.json").read_text()) for each in (lora_run, run))
    assert second["base_model_name_or_path"] == first["base_model_name_or_path"]
    assert second["r"] == first["r"]
    assert load(str(run)).scale == load(str(lora_run)).scale == 2
    before, after = weights(lora_run), weights(run)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("lora_" in name or "modules_to_save" in name for name in changed)
    assert any("lora_A" in name for name in changed)
    assert any("embed_tokens" in name for name in changed)
    trained = [json.loads((each / "run.json").read_text())["trainable_parameters"] for each in (lora_run, run)]
    assert trained[0] == trained[1]
    # The first adapter is where it began: at a rate of nothing, nothing changes.
    still = {"steps": 1, "learning_rate": 1e-30, "global_batch_size": 2, "activation_checkpointing": False}
    same = train(further(lora_run, rows, training=still), tmp_path / "same")
    assert torch.equal(logits(same), logits(lora_run))
    assert "| tuned further from |" in (run / "README.md").read_text()


def test_an_adapter_of_a_bfloat16_base_is_tuned_further_in_float32(lora_run: Path, rows: Path) -> None:
    """PEFT gives copies of embeddings and norms the dtype of the base, where most updates are rounded to zero."""
    recipe = further(lora_run, rows, model={"name": str(lora_run), "dtype": "bfloat16"})
    tuned = load_for_tuning(recipe, resolve_for_training(recipe))
    dtypes = {weight.requires_grad: weight.dtype for weight in tuned.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert all(weight.dtype == dtypes[weight.requires_grad] for weight in tuned.parameters())


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="pip install pi-lora[qlora]")
def test_qlora_tunes_the_same_adapter_further(lora_run: Path, rows: Path, tmp_path: Path) -> None:
    """TRL rounds it to bfloat16, norms by up to a thousandth."""
    still = {"steps": 1, "learning_rate": 1e-30, "global_batch_size": 2, "activation_checkpointing": False}
    recipe = further(lora_run, rows, tuning={"method": "qlora", "rank": 4}, training=still)
    before, after = (
        load_file(each / "adapter_model.safetensors") for each in (lora_run, train(recipe, tmp_path / "same"))
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in before.values())
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_pose_tunes_an_extended_model_further_with_short_sequences(lora_run: Path, tmp_path: Path) -> None:
    """PoSE needs sequence_tokens here: a sequence of the whole window skips nothing."""
    data = {"source": "builtin:recall", "positions": "pose", "sequence_tokens": 32}
    recipe = further(lora_run, Path(), data=data)
    run = train(recipe, tmp_path / "further")
    sequences = recipe.training.steps * recipe.training.global_batch_size
    assert json.loads((run / "run.json").read_text())["tokens"] == sequences * 32
    assert load(str(run)).scale == 2
    assert not torch.equal(logits(run), logits(lora_run))
    with pytest.raises(ValueError, match=r"data\.sequence_tokens .*scaling: keep"):
        further(lora_run, Path(), data={**data, "sequence_tokens": None})


@pytest.mark.parametrize("tuning", [{"rank": 8}, {"method": "full"}])
def test_merged_weights_are_tuned_with_any_shape(
    lora_run: Path, rows: Path, tmp_path: Path, tuning: dict[str, Any]
) -> None:
    merged = merge(lora_run, tmp_path / "merged").folder
    run = train(
        further(merged, rows, tuning=tuning, training={"steps": 1, "learning_rate": 1e-2}), tmp_path / "further"
    )
    loaded = load(str(run))
    assert (loaded.scale, loaded.window) == (2, 128)
    assert not torch.equal(logits(run), logits(merged))
    assert json.loads((run / "run.json").read_text())["original"] == 64


ANOTHER = ("tuning: ", "{run}", "pi-lora merge")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            ({"tuning": {"rank": 4, **other}}, (*ANOTHER, "rank 4", "alpha 8"))
            for other in (
                {"rank": 8, "alpha": 8},
                {"alpha": 9},
                {"modules_to_save": "nothing"},
                {"target_modules": ["q_proj"]},
            )
        ),
        ({"tuning": {"method": "full"}}, ANOTHER),
        ({"context": {"target": 129}}, ("context.target: 129 ", "{run}", "128")),
        ({"scaling": "pi", "context": {"target": 256}}, ("{run}: is extended", "scaling: keep", "merge")),
        (
            {"model": {"name": "builtin:tiny"}, "context": {"target": 512}},
            ("context.target: 512 ", "builtin:tiny", "256", "scaling: keep"),
        ),
        ({"model": {"name": "adapters/none"}}, ("adapters/none: ",)),
    ],
)
def test_adapters_that_cannot_be_tuned_further_are_refused(
    lora_run: Path, rows: Path, tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    where, *names = (word.format(run=lora_run) for word in words)
    with refused(PiLoraError, where, *names):
        train(further(lora_run, rows, **changes), tmp_path / "further")
    assert not (tmp_path / "further").exists()


def test_tuning_further_resumes_to_the_same_weights(lora_run: Path, rows: Path, tmp_path: Path) -> None:
    """Groups of like lengths follow from seed and epoch alone, also after an interruption."""
    training = {"steps": 4, "learning_rate": 1e-2, "global_batch_size": 2, "activation_checkpointing": False}
    recipe = further(lora_run, rows, training={**training, "warmup_steps": 1})
    whole = train(recipe, tmp_path / "whole")

    def stop_after_two(done: int, total: int, note: str = "") -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "halves", progress=stop_after_two)
    halves = train(recipe, tmp_path / "halves", resume=True)
    expected, found = (load_file(run / "adapter_model.safetensors") for run in (whole, halves))
    assert found.keys() == expected.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    tokens = [json.loads((each / "training.jsonl").read_text().splitlines()[-1])["tokens"] for each in (whole, halves)]
    assert tokens[0] == tokens[1]
