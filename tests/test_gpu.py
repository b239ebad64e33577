"""What only a GPU can show: `pytest -m gpu`. None of it has run where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

import architectures
from conftest import small_recipe, train
from pi_lora.distributed import launch_arguments
from pi_lora.models import attention
from pi_lora.recipe.files import dump_recipe
from pi_lora.recipe.schema import Recipe
from random_runs import save_base

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]

COMMAND = ["train", "recipe.yaml", "--output", "run"]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices here")


def recipe_for(model: Path, gpus: int = 1, **changes: object) -> Recipe:
    training = {**small_recipe(model).training.model_dump(), "global_batch_size": 8, "per_device_batch_size": 1}
    return small_recipe(
        model, **{"training": training, "hardware": {"gpus": gpus}, "tuning": {"method": "full"}} | changes
    )


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "training.jsonl").read_text().splitlines()]


def launched(recipe: Recipe, folder: Path) -> Path:
    """Train through accelerate's launcher, even where one process would do."""
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *launch_arguments(recipe, COMMAND)]
    subprocess.run(launcher, cwd=folder, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, timeout=500)
    return folder / "run"


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=TWO_GPUS)])
@pytest.mark.parametrize("tuning", [{"method": "full"}, {"rank": 4}], ids=["full", "lora"])
def test_fsdp2_trains_like_one_process(small_model: Path, tmp_path: Path, tuning: dict[str, object], gpus: int) -> None:
    alone = train(recipe_for(small_model, tuning=tuning), tmp_path / "alone")
    sharded = launched(recipe_for(small_model, gpus=gpus, tuning=tuning), tmp_path)
    assert losses(sharded) == pytest.approx(losses(alone), rel=2e-2)
    one, other = (load_file(next(run.glob("*.safetensors"))) for run in (alone, sharded))
    assert set(one) == set(other)


@TWO_GPUS
def test_context_parallelism_trains_like_one_process(small_model: Path, tmp_path: Path) -> None:
    alone = train(recipe_for(small_model), tmp_path / "alone")
    shared = launched(recipe_for(small_model, hardware={"gpus": 2, "context_parallel": 2}), tmp_path)
    assert losses(shared) == pytest.approx(losses(alone), rel=2e-2)


def test_offloaded_activations_give_the_same_weights(small_model: Path, tmp_path: Path) -> None:
    training = {**recipe_for(small_model).training.model_dump(), "activation_checkpointing": True}
    runs = [
        train(
            recipe_for(small_model, training=training, hardware={"gpus": 1, "offload_activations": offload}),
            tmp_path / str(offload),
        )
        for offload in (False, True)
    ]
    # Not to the last bit: backward kernels add in no fixed order.
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-3)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "gemma2", "mistral"])
def test_attention_in_blocks_equals_eager(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_ON_GPU", 8)
    config = architectures.small_config(model_type)
    config.sliding_window = 12
    model = architectures.small_model(type(config), config.to_dict()).to("cuda")
    ids = torch.randint(2, 60, (2, 30), device="cuda")
    outcomes = []
    for kernel in ("eager", attention.BLOCKWISE):
        model.set_attn_implementation(kernel)
        model.zero_grad()
        logits = model(ids, use_cache=False).logits
        logits.square().mean().backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        outcomes.append({"logits": logits.detach(), **gradients})
    eager, blockwise = outcomes
    for name, value in eager.items():
        torch.testing.assert_close(blockwise[name], value, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "paged_adamw_8bit"])
def test_qlora_trains_on_a_gpu(tmp_path: Path, optimizer: str) -> None:
    pytest.importorskip("bitsandbytes", reason="pip install pi-lora[qlora]")
    # bitsandbytes 0.50 warns of widths that are no multiples of 64.
    sizes = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
    base = save_base(
        LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2), tmp_path / "base", torch.bfloat16
    )
    training = {**recipe_for(base).training.model_dump(), "optimizer": optimizer, "steps": 20}
    run = train(recipe_for(base, tuning={"method": "qlora", "rank": 4}, training=training), tmp_path / "run")
    assert losses(run)[-1] < losses(run)[0]
    assert {tensor.dtype for tensor in load_file(run / "adapter_model.safetensors").values()} == {torch.float32}
