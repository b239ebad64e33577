"""Mixtures of experts: an adapter on stacked weights is merged into the tensors that the files have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from architectures import small_config
from conftest import small_recipe, train
from pi_lora.api import load, merge
from pi_lora.scaling.extension import Extension
from random_runs import TWICE, save_base, save_run, stored, tuned

IDS = torch.randint(2, 60, (2, 100), generator=torch.Generator().manual_seed(5))
STACKED = ["experts.gate_up_proj", "experts.down_proj"]
# One of each kind: stored by expert, under older names, stacked and renamed, stacked and transposed.
QUICK = ("qwen3_moe", "mixtral", "granitemoe", "gpt_oss")
KINDS = (
    "aria_text axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe flex_olmo glm4_moe glm4_moe_lite "
    "glm_moe_dsa granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 laguna lfm2_moe "
    "longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text olmoe qwen2_moe qwen3_5_moe_text "
    "qwen3_next solar_open"
).split()

ADAPTED = (
    "experts.0.up_proj.weight",
    "experts.0.w1.weight",
    "mlp.up_proj.weight",
    "shared_experts.up_proj.weight",
    "input_linear.weight",
)
ROUTERS = (".gate.weight", "router.weight", "classifier.weight", "gate.wg.weight", "router.layer.weight")
# PEFT 0.21 would not load their adapters again.
TRAINED = [kind for kind in (*QUICK, *KINDS) if kind not in ("axk2", "laguna", "deepseek_v3")]
PROJECTIONS = {"qwen3_moe": ["gate_proj", "up_proj", "down_proj"], "mixtral": ["w1", "w2", "w3"]}
SLOW = pytest.mark.slow


def config_of(kind: str) -> PreTrainedConfig:
    config: Any = small_config(kind)
    config.vocab_size = 1024
    if kind == "gpt_oss":
        config.rope_parameters = {**config.rope_parameters, "factor": 4.0, "original_max_position_embeddings": 16}
    return config


@torch.no_grad()
# PEFT applies the pattern, and warns that it does not.
@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys")
@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(kind, marks=SLOW) for kind in KINDS)])
def test_adapted_experts_are_merged(kind: str, tmp_path: Path) -> None:
    base = save_base(config_of(kind), tmp_path / "base")
    extension = Extension(128, scaling="yarn") if kind == "gpt_oss" else TWICE
    targets = {"target_modules": ["o_proj", "out_proj"], "target_parameters": STACKED}
    run = save_run(base, tmp_path / "run", extension, r=2, alpha_pattern={r"experts\.down_proj": 6}, **targets)
    logits = tuned(base, run)(IDS).logits
    merged = merge(run, tmp_path / "merged")
    assert stored(merged.folder).keys() == stored(base).keys()
    model = AutoModelForCausalLM.from_pretrained(merged.folder)
    torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["deepseek_v3", "jetmoe", *(pytest.param(kind, marks=SLOW) for kind in TRAINED)])
def test_experts_that_trained_are_merged_and_routers_do_not_train(kind: str, tmp_path: Path) -> None:
    """Dense and shared MLPs train as well."""
    base = save_base(config_of(kind), tmp_path / "base")
    recipe = small_recipe(base, scaling="yarn" if kind == "gpt_oss" else "pi")
    run = train(recipe, tmp_path / "run")
    merged = merge(run, tmp_path / "merged", check="logits").folder
    before = stored(base)
    unchanged = {name for name, weight in stored(merged).items() if torch.equal(weight, before[name])}
    assert not {name for name in unchanged if name.endswith(("self_attn.o_proj.weight", *ADAPTED))}
    assert {name for name in before if name.endswith(ROUTERS)} <= unchanged
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(merged)(IDS).logits
        torch.testing.assert_close(logits, load(str(run)).module(IDS).logits, rtol=1e-5, atol=2e-5)


def save_adapter_4(base: Path, kind: str, folder: Path) -> Path:
    """An adapter made with transformers 4, where each expert has linear layers."""
    run = save_run(base, folder, r=2, target_modules=["q_proj"])
    matrices: dict[str, torch.Tensor] = {}
    for name, weight in stored(base).items():
        if ".experts." in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            outputs, inputs = weight.shape
            matrices[f"{module}.lora_A.weight"] = torch.randn(2, inputs) * 0.1
            matrices[f"{module}.lora_B.weight"] = torch.randn(outputs, 2) * 0.1
    save_file(stored(run) | matrices, run / "adapter_model.safetensors")
    settings = json.loads((run / "adapter_config.json").read_text())
    settings["target_modules"] = ["q_proj", *PROJECTIONS[kind]]
    (run / "adapter_config.json").write_text(json.dumps(settings))
    return run


@torch.no_grad()
@pytest.mark.parametrize(("kind", "is_stacked"), [("mixtral", False), ("qwen3_moe", True)])
def test_an_adapter_of_transformers_4_is_merged(kind: str, is_stacked: bool, tmp_path: Path) -> None:
    base = save_base(config_of(kind), tmp_path / "base")
    run = save_adapter_4(base, kind, tmp_path / "run")
    expected = tuned(base, run)(IDS).logits
    if is_stacked:
        model = AutoModelForCausalLM.from_pretrained(base)
        save_file(model.state_dict(), base / "model.safetensors", {"format": "pt"})
    merged = merge(run, tmp_path / "merged", check="logits").folder
    assert stored(merged).keys() == stored(base).keys()
    logits = AutoModelForCausalLM.from_pretrained(merged)(IDS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


PROBE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype=torch.float32)
ids = torch.randint(2, 60, (2, 100), generator=torch.Generator().manual_seed(5))
with torch.no_grad():
    torch.save(model(ids).logits, sys.argv[2])
"""


@pytest.mark.slow
@torch.no_grad()
def test_transformers_4_gives_the_same_logits(in_transformers_4: Callable[..., str], tmp_path: Path) -> None:
    for kind in ("qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next"):
        base = save_base(config_of(kind), tmp_path / kind)
        run = save_run(base, tmp_path / f"{kind}-run", r=2, target_modules=["o_proj"], target_parameters=STACKED)
        merged = merge(run, tmp_path / f"{kind}-merged").folder
        in_transformers_4(PROBE, merged, tmp_path / "logits.pt")
        logits = AutoModelForCausalLM.from_pretrained(merged)(IDS).logits
        torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), logits, rtol=1e-5, atol=1e-5)
