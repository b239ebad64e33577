"""Mixtures of experts: an adapter on stacked weights is merged into the tensors that the files have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import small_config
from random_runs import save_base, save_run, stored, tuned
from transformers import AutoModelForCausalLM

from pi_lora.api import merge

IDS = torch.randint(2, 60, (2, 100), generator=torch.Generator().manual_seed(5))
STACKED = ["experts.gate_up_proj", "experts.down_proj"]
KINDS = (
    "deepseek_v2 deepseek_v3 ernie4_5_moe glm4_moe glm4_moe_lite gpt_oss granitemoe longcat_flash minimax minimax_m2 "
    "mixtral olmoe qwen2_moe qwen3_moe qwen3_next solar_open"
).split()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_adapted_experts_are_merged(kind: str, tmp_path: Path) -> None:
    config = small_config(kind)
    config.vocab_size = 1024
    base = save_base(config, tmp_path / "base")
    run = save_run(base, tmp_path / "run", r=2, target_modules=["o_proj"], target_parameters=STACKED)
    expected = tuned(base, run)
    logits = expected(IDS).logits
    merged = merge(run, tmp_path / "merged", check="logits")
    assert stored(merged.folder).keys() == stored(base).keys()
    model = AutoModelForCausalLM.from_pretrained(merged.folder)
    difference = (model(IDS).logits - logits).abs().max()
    print(kind, float(difference), float((AutoModelForCausalLM.from_pretrained(base)(IDS).logits-logits).abs().max()), merged.lines)
    torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-5, atol=1e-5)
