"""Loaded weights: results do not depend on what a model read before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pi_lora.api import load
from pi_lora.data.tokens import Labelled
from pi_lora.evaluation.chat import chat_score
from pi_lora.evaluation.forward import last_logits, token_losses
from pi_lora.evaluation.generation import generate_ids
from pi_lora.models.loaded import LoadedModel
from pi_lora.recipe.evaluation import Sampling
from pi_lora.scaling.config import Extension

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
    longer = torch.randint(2, 1024, (900,), generator=generator).tolist()
    shorter = torch.randint(2, 1024, (500,), generator=generator).tolist()
    model = load("builtin:tiny", Extension(1024, scaling="dynamic"))
    before = read(model, shorter)
    read(model, longer)
    assert read(model, shorter) == before
