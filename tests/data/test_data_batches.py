"""The loss of a batch against a plain reference: eager attention under an explicit causal mask."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_flash_attention_utils import _is_packed_sequence, prepare_fa_kwargs_from_position_ids

from pi_lora.data.batches import collate
from pi_lora.data.packing import skip_positions

ORIGINAL, TARGET = 64, 256


def rows(number: int, chunks: int = 3) -> list[dict[str, list[int]]]:
    rng = random.Random(number)
    return [
        {
            "input_ids": [rng.randrange(1024) for _ in range(ORIGINAL)],
            "position_ids": skip_positions(rng, ORIGINAL, TARGET, chunks),
        }
        for _ in range(number)
    ]


def reference_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Every token attends to all before it, with the rotary angles of its own position."""
    model.set_attn_implementation("eager")
    later = torch.full((ORIGINAL, ORIGINAL), torch.finfo(torch.float32).min).triu(diagonal=1)
    mask = later[None, None].expand(len(batch["input_ids"]), 1, -1, -1)
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=mask).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()).item()


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor], kernel: str) -> float:
    model.set_attn_implementation(kernel)
    with torch.no_grad():
        # As TRL trains: without a cache, which is when transformers looks for packed sequences.
        return model(**batch, use_cache=False).loss.item()


def test_padding_and_what_is_not_learned_have_no_label() -> None:
    chats = {"input_ids": [1, 2, 3, 4, 5], "learned": [False, True, False, False, True], "lengths": [2, 3]}
    batch = collate([chats, {"input_ids": [6, 7], "learned": [True, True]}], padding=9)
    assert batch["input_ids"].tolist() == [[1, 2, 9], [3, 4, 5], [6, 7, 9]]
    assert batch["labels"].tolist() == [[-100, 2, -100], [-100, -100, 5], [6, 7, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("size", [1, 2])
def test_chunks_attend_to_each_other(small_model: Path, size: int, kernel: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_model)
    batch = collate(rows(size))
    expected = reference_loss(model, batch)
    assert loss(model, batch, kernel) == pytest.approx(expected, rel=1e-6)
    # What the mask is for: without it each chunk would be a sequence of its own.
    assert loss(model, {**batch, "attention_mask": None}, kernel) != pytest.approx(expected, rel=1e-3)


def test_flash_attention_takes_skipping_positions_for_one_sequence() -> None:
    # A mask of ones does not reach the kernel; with one sequence in the batch transformers then asks the positions,
    # and begins a sequence at each that equals the least, which is the first alone.
    positions = collate(rows(1))["position_ids"]
    assert _is_packed_sequence(positions, batch_size=1)
    (queries, keys), _ = prepare_fa_kwargs_from_position_ids(positions)
    assert queries.tolist() == keys.tolist() == [0, ORIGINAL]
    assert not _is_packed_sequence(collate(rows(2))["position_ids"], batch_size=2)
