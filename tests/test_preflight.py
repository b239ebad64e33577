import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import small_recipe

from pi_lora.errors import RecipeError, ScalingError
from pi_lora.models.machine import computes_in_bfloat16, dtype_of_base
from pi_lora.planning.gpus import GIB
from pi_lora.planning.text import plan_lines
from pi_lora.preflight import check, plan_here


def test_weights_are_not_read(small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((small_model / "config.json").read_bytes())
    checked = check(small_recipe(folder), tmp_path / "run")
    assert (checked.original, checked.window, checked.scale) == (64, 128, 2)
    assert not (tmp_path / "run").exists()


def test_a_single_mistake_keeps_its_kind(small_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ScalingError, match="64 is not longer than the model's own window of 64"):
        check(small_recipe(small_model, context={"target": 64}), tmp_path / "run")


def test_everything_wrong_is_said_at_once(small_model: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    recipe = small_recipe(
        small_model,
        model={"name": "./gone", "attention": "flash_attention_2"},
        data={"source": "nowhere.txt"},
        training={"schedule": "linear", "schedule_options": {"min_lr": 1}, "optimizer": "paged_adamw_8bit"},
        hardware={"gpus": 64, "offload_activations": True},
        evaluation={"perplexity": {"data": "./no-such"}, "benchmarks": {"data": ["boolq=gone.jsonl"]}},
    )
    with pytest.raises(RecipeError) as raised:
        check(recipe, taken)
    said = [line.split(": ")[0] for line in str(raised.value).splitlines()]
    for where in (
        "./gone",
        "data.source",
        "evaluation.perplexity.data",
        "evaluation.benchmarks.data",
        "hardware.gpus",
        "hardware.offload_activations",
        "training.schedule_options",
        str(taken),
    ):
        assert where in said, (where, str(raised.value))


@pytest.mark.parametrize(
    ("changes", "package", "line"),
    [
        ({"tuning": {"method": "qlora"}}, "bitsandbytes", "tuning.method: qlora: needs the package bitsandbytes"),
        ({"evaluation": {"benchmarks": {}}}, "lm_eval", "evaluation.benchmarks: needs the package lm_eval"),
        ({"training": {"tracking": ["wandb"]}}, "wandb", "training.tracking: wandb: needs the package wandb"),
        (
            {"model": {"name": "m", "attention": "flash_attention_2"}},
            "flash_attn",
            "model.attention: flash_attention_2: needs the package flash_attn",
        ),
    ],
)
def test_a_missing_package_is_named(
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, dict[str, object]],
    package: str,
    line: str,
) -> None:
    monkeypatch.delitem(sys.modules, package, raising=False)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    if "model" in changes:
        changes = {"model": {**changes["model"], "name": str(small_model)}}
    with pytest.raises(RecipeError) as raised:
        check(small_recipe(small_model, **changes), tmp_path / "run")
    assert any(each.startswith(line) for each in str(raised.value).splitlines())


@pytest.mark.parametrize(
    ("name", "gibibytes", "bfloat16", "peak"),
    [
        ("NVIDIA GeForce RTX 3090", 23.7, True, 71e12),
        ("Tesla T4", 14.6, False, 8.1e12),
        ("NVIDIA B200", 178.4, True, 2250e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75, True, None),
        ("NVIDIA RTX PRO 6000 Blackwell", 95.0, True, None),
    ],
)
def test_the_plan_is_for_the_gpu_that_is_here(
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    gibibytes: float,
    bfloat16: bool,
    peak: float | None,
) -> None:
    gpu = SimpleNamespace(name=name, total_memory=int(gibibytes * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device=0: gpu)
    # All of them compute in bfloat16 if it is emulated.
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or bfloat16
    )
    recipe = small_recipe(small_model, hardware={"gpus": 1})
    plan = plan_here(recipe, check(recipe, tmp_path / "run"))
    assert plan
    assert (plan.gpu.name, plan.gpu.memory, plan.gpu.bfloat16) == (name, gpu.total_memory, bfloat16)
    assert plan.gpu.peak == (peak and pytest.approx(peak))
    assert f"of {gibibytes:.1f} GiB on 1 x {name}" in plan_lines(plan)[1]
    assert computes_in_bfloat16(recipe) == bfloat16
    assert dtype_of_base(recipe) == (torch.bfloat16 if bfloat16 else torch.float32)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"evaluation": {"perplexity": {"stride": 129}}},
            "evaluation.perplexity.stride: 129 is longer than the target window of 128; lower it",
        ),
        (
            {"evaluation": {"perplexity": {}, "while_training": {"truncate": 127}}},
            "evaluation.while_training.truncate: 127 tokens do not hold the target window of 128; raise it",
        ),
        (
            {"training": {"optimizer": "paged_adamw_8bit"}, "hardware": {"gpus": 2}},
            "training.optimizer: paged_adamw_8bit cannot train weights that are sharded over GPUs; use adamw",
        ),
    ],
)
def test_what_would_fail_after_days_is_refused(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], line: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(RecipeError) as raised:
        check(small_recipe(small_model, **changes), tmp_path / "run")
    assert line in str(raised.value).splitlines()


def test_a_stride_longer_than_a_window_is_a_mistake_of_the_recipe(small_model: Path) -> None:
    with pytest.raises(ValueError, match="stride: 100 is longer than the shortest window, 64; lower it"):
        small_recipe(small_model, evaluation={"perplexity": {"windows": [64, 128], "stride": 100}})


@pytest.mark.parametrize(
    ("short", "line"), [({"stride": 65}, "stride: 65 is"), ({"truncate": 127}, "truncate: 127 tok")]
)
def test_what_is_measured_in_short_must_be_possible_too(small_model: Path, short: dict[str, int], line: str) -> None:
    asked = {"perplexity": {"windows": [64, 128]}, "while_training": short}
    with pytest.raises(ValueError, match=line):
        small_recipe(small_model, evaluation=asked)


def test_gpus_that_are_not_there_are_missed(small_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"hardware.gpus: 64 needed on each machine, \d+ here"):
        check(small_recipe(small_model, hardware={"gpus": 64}, training={"global_batch_size": 64}), tmp_path / "run")
