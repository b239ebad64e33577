"""Loaded weights: results do not depend on what a model read before."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from pi_lora.api import load
from pi_lora.data.tokens import Labelled
from pi_lora.errors import ModelError
from pi_lora.evaluation.chat import chat_score
from pi_lora.evaluation.forward import last_logits, token_losses
from pi_lora.evaluation.generation import generate_ids
from pi_lora.model_ref import ModelRef
from pi_lora.models import loaded
from pi_lora.models.loaded import LoadedModel, Placement, load_base
from pi_lora.models.resolve import resolve_model
from pi_lora.recipe.evaluation import Sampling
from pi_lora.scaling.extension import Extension

GREEDY = Sampling(temperature=0.0, max_new_tokens=12)


def chat(model: LoadedModel, ids: list[int]) -> Any:
    return chat_score("chat", Labelled(ids, [True] * len(ids)), model, None)


READERS: dict[str, Callable[[LoadedModel, list[int]], Any]] = {
    "losses": lambda model, ids: token_losses(model.module, torch.tensor([ids]), range(1, len(ids))).tolist(),
    "last logits": lambda model, ids: last_logits(model.module, ids, tail=4, prefix=None).tolist(),
    "answer": lambda model, ids: generate_ids(model, [ids], GREEDY).tolist(),
    "chat": chat,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_dynamic_frequencies_do_not_depend_on_earlier_inputs(read: Callable[[LoadedModel, list[int]], Any]) -> None:
    """transformers keeps the frequencies of the longest input until one shorter than L comes."""
    generator = torch.Generator().manual_seed(0)
    longer = torch.randint(2, 1024, (600,), generator=generator).tolist()
    shorter = torch.randint(2, 1024, (300,), generator=generator).tolist()
    model = load(ModelRef("builtin:tiny", extension=Extension(1024, scaling="dynamic")))
    before = read(model, shorter)
    read(model, longer)
    assert read(model, shorter) == before


@pytest.mark.parametrize(
    ("placement", "gpu", "device_map"),
    [
        ("device", "cuda", {"": 3}),
        ("quantized", "cuda", {"": 3}),
        ("host", "cuda", None),
        ("device", "cpu", None),
    ],
)
def test_weights_are_read_straight_into_the_gpu_of_the_process(
    placement: Placement,
    gpu: str,
    device_map: dict[str, int] | None,
    small_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a copy in host memory, which may be smaller; only FSDP spreads weights from there."""
    asked: dict[str, Any] = {}

    def refuse(*_: Any, **options: Any) -> None:
        asked.update(options)
        raise OSError("not read in this test")

    monkeypatch.setattr(loaded, "device", lambda: torch.device(gpu))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(ModelError, match="not read in this test"):
        load_base(resolve_model(str(small_model)), torch.bfloat16, placement=placement)
    assert asked.get("device_map") == device_map


def test_a_notebook_has_the_progress_bars_of_transformers_after_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    # As without the environment variable.
    monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "HF_HUB_DISABLE_PROGRESS_BARS", None)
    transformers.logging.enable_progress_bar()
    try:
        load("builtin:tiny")
        assert transformers.logging.is_progress_bar_enabled()
    finally:
        transformers.logging.disable_progress_bar()
