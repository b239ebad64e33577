"""Tokens a second of a training step on four chats: padded, isolated in a packed row, and wrapped there.

    python scripts/fetch_model.py smollm2_135m_instruct
    python benchmarks/packing.py

A step is LoRA's forward and backward pass on SmolLM2-135M, as `pi-lora train` computes it without activation
checkpointing, in processor seconds of one thread and up to 19 GB. The lengths spread evenly over 200 to 2,000 tokens.
"""

import time
from functools import partial
from pathlib import Path
from timeit import repeat
from typing import Any

import torch

from pi_lora.data.batches import collate
from pi_lora.models.resolve import resolve_for_training
from pi_lora.recipe.files import find_recipe, load_recipe
from pi_lora.training.job import load_for_tuning
from pi_lora.training.loss import compute_loss_in_place
from record import parser_of, write_row

LENGTHS = (425, 875, 1325, 1775)
ROUNDS = 2


def step(model: Any, batch: dict[str, Any]) -> None:
    """Compute a loss and its gradients."""
    model(**batch, use_cache=False)[0].backward()


def main() -> None:
    parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(find_recipe(Path("smollm2_135m_16k_cpu")), ["data.packing=isolated"]).recipe
    model = load_for_tuning(recipe, resolve_for_training(recipe))
    compute_loss_in_place(model.get_base_model())
    tokens = sum(LENGTHS)
    ids = torch.arange(tokens)
    chats = [{"input_ids": ids, "lengths": torch.tensor(LENGTHS)}]
    padded = collate(chats)
    del padded["attention_mask"]  # padding on the right needs none
    batches = {"padded": padded, "isolated": collate(chats, isolates=True), "wrapped": collate([{"input_ids": ids}])}
    for way, batch in batches.items():
        seconds = repeat(partial(step, model, batch), timer=time.process_time, number=1, repeat=ROUNDS)
        write_row("packing", ("runs", way), {"tokens_per_second": tokens / min(seconds)})


if __name__ == "__main__":
    main()
