"""Which attention kernel `auto` stands for."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pi_lora.models import machine as kernels
from pi_lora.models.model import find


def test_liger_has_the_table_that_is_read() -> None:
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch", reason="pip install pi-lora[liger]")
    assert {"llama", "mistral", "qwen3"} < set(patches.MODEL_TYPE_TO_APPLY_LIGER_FN)


@pytest.mark.parametrize(
    ("generation", "installed", "settings", "chosen"),
    [
        (9, {3, 4}, {}, "flash_attention_3"),
        (10, {3, 4}, {}, "flash_attention_4"),
        (9, {3}, {"in_bfloat16": False}, "sdpa"),
        (9, {3}, {"context_parallel": 2}, "sdpa"),
        (9, {4}, {}, "sdpa"),
        (None, {3, 4}, {}, "sdpa"),
    ],
)
def test_auto_takes_what_is_made_for_the_gpu(
    generation: int | None,
    installed: set[int],
    settings: dict[str, Any],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "device", lambda: torch.device("cuda" if generation else "cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
    for version in (3, 4):
        present = version in installed
        monkeypatch.setattr(f"transformers.utils.is_flash_attn_{version}_available", lambda present=present: present)
    model = find("builtin:tiny")
    model.skeleton._compatible_flash_implementations = None
    monkeypatch.setattr(PreTrainedModel, "get_correct_attn_implementation", lambda _, kernel: kernel)
    assert model.attention(**{"asked": "auto", "in_bfloat16": True, **settings}) == chosen
