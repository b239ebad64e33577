"""Weights that are missing, of another shape or no numbers are refused: they would give results that look like any."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import refused, small_recipe, train
from pi_lora.api import load
from pi_lora.errors import Diverged, ModelError
from pi_lora.evaluation.measurement import Session
from pi_lora.evaluation.passkey import Passkey
from pi_lora.model_ref import ModelRef
from pi_lora.models.loaded import load_base
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.evaluation import PasskeyOptions
from pi_lora.run import Run
from pi_lora.staging import staging_path
from pi_lora.training.callbacks import StopOnDivergence

WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def base(small_model: Path, tmp_path: Path) -> Path:
    """A copy of the small model to break."""
    return Path(shutil.copytree(small_model, tmp_path / "base"))


def edit(file: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def one(value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[UP].view(-1)[7:8].fill_(value)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda tensors: tensors.pop(UP), (f"{UP} is missing",)),
        (
            lambda tensors: [tensors.pop(key) for key in list(tensors) if "layers.1." in key],
            (" is missing; model.layers.1",),
        ),
        (lambda tensors: tensors.update({UP: torch.zeros(3, 4)}), ("config.json", UP, "[3, 4]", "[48, 32]")),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), ("extra is not in its config",)),
        (one(math.nan), (f"{UP} has infinite",)),
        (one(-math.inf), (f"{UP} has infinite",)),
    ],
)
def test_a_base_with_missing_extra_or_misshapen_tensors_is_refused(
    base: Path, change: Callable[[Tensors], object], names: tuple[str, ...]
) -> None:
    edit(base / WEIGHTS, change)
    with refused(ModelError, str(base), *names):
        load(str(base))


def test_tied_weights_and_old_checkpoints_are_accepted(base: Path) -> None:
    """The head is the embedding, and former versions stored the frequencies of each layer."""
    assert "lm_head.weight" not in load_file(base / WEIGHTS)
    edit(
        base / WEIGHTS, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    load(str(base))


def test_nan_weights_are_refused_when_quantized_to_nf4(base: Path) -> None:
    pytest.importorskip("bitsandbytes")
    edit(base / WEIGHTS, one(math.nan))
    with refused(ModelError, str(base), UP):
        load_base(resolve_model(str(base)), torch.bfloat16, placement="quantized")


@pytest.mark.parametrize(
    ("stored", "value", "dtype"),
    [
        (torch.float16, -math.inf, "float32"),
        (torch.float64, 1e300, "float32"),
        (torch.bfloat16, 1e5, "float16"),
    ],
)
def test_weights_that_are_not_finite_as_stored_or_loaded_are_refused(
    base: Path, stored: torch.dtype, value: float, dtype: str
) -> None:
    edit(base / WEIGHTS, lambda tensors: tensors.update({key: each.to(stored) for key, each in tensors.items()}))
    edit(base / WEIGHTS, one(value))
    with refused(ModelError, str(base), UP):
        load(ModelRef(str(base), dtype=dtype))


def test_large_weights_whose_sum_overflows_are_accepted(base: Path) -> None:
    edit(base / WEIGHTS, lambda tensors: tensors[UP].fill_(3e38))
    load(str(base))


def test_an_adapter_with_nan_weights_is_refused(lora_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(lora_run, tmp_path / "run"))
    edit(run / "adapter_model.safetensors", lambda tensors: next(iter(tensors.values())).view(-1)[:1].fill_(math.nan))
    with refused(ModelError, str(run), "infinite"):
        load(str(run))


def test_overflowing_logits_are_refused_rather_than_scored_as_k_max_0(base: Path) -> None:
    """Each weight is a number, and in float16 what comes of them is not."""
    edit(base / WEIGHTS, lambda tensors: tensors["model.norm.weight"].fill_(6e4))
    loaded = load(ModelRef(str(base), dtype="float16"))
    with refused(ModelError, str(base), "infinite", "float16", "--dtype"):
        Passkey().run(loaded, PasskeyOptions(target=300, depths=1, trials=1), Session())


@pytest.mark.parametrize("method", ["lora", "full"])
def test_weights_that_diverged_in_the_last_step_are_not_saved(
    small_model: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a step is that of the weights before it, so that of the last step tells nothing of what is saved."""

    def overflow(_log: Any, _args: Any, state: Any, _control: Any, model: Any, **_: Any) -> None:
        if state.global_step == 1:
            next(weight for weight in model.parameters() if weight.requires_grad).data.view(-1)[3] = math.inf

    monkeypatch.setattr(StopOnDivergence, "on_optimizer_step", overflow)
    training = {"steps": 2, "global_batch_size": 1, "learning_rate": 1e-3, "save_every": 1}
    recipe = small_recipe(small_model, training=training, tuning={"method": method, "rank": 4})
    output = tmp_path / "run"
    with refused(Diverged, "training.learning_rate: the weights of step 2 ", 0.001):
        train(recipe, output)
    assert not output.exists()
    kept = Run(staging_path(output)).last_checkpoint
    assert kept
    assert kept.name == "checkpoint-1"
