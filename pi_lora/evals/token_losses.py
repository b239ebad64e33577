"""The loss of chosen tokens: logits for nothing else, and never many at a time."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

# 128 MiB and 1 GiB in float32; a window of 32k tokens over a vocabulary of 128k has 4 billion, or 16 GiB.
LOGITS_ON_CPU = 2**25
LOGITS_ON_GPU = 2**28


@torch.no_grad()
def token_losses(model: Any, ids: torch.Tensor, tokens: Sequence[int], at_once: int | None = None) -> torch.Tensor:
    """The loss in nats of the tokens at `tokens` in each row of `ids` (rows, length): (rows, tokens), on the CPU.

    `at_once` logits are in memory at a time, or those of one position of every row where that is more.
    """
    places = torch.tensor(tokens, device=ids.device)
    at_once = at_once or (LOGITS_ON_CPU if ids.device.type == "cpu" else LOGITS_ON_GPU)
    positions = max(1, at_once // (len(ids) * model.config.get_text_config().vocab_size))
    parts = [places[start : start + positions] for start in range(0, len(places), positions)]
    # What ModernBERT's decoder calls its decoder is its head (transformers 5.23).
    if len(parts) == 1 or not isinstance(model.get_decoder(), PreTrainedModel):
        parts, logits = [places], iter([_logits(model, ids, places)])
    else:
        logits = _logits_in_parts(model, ids, parts)
    losses = [
        cross_entropy(some.float().flatten(0, 1), ids[:, part].flatten(), reduction="none").view(len(ids), -1)
        for part, some in zip(parts, logits, strict=True)
    ]
    return torch.cat(losses, dim=1).cpu()


def _logits(model: Any, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What the model expects at `places`: the logits of the positions before them."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=places - 1).logits
    return logits


def _logits_in_parts(model: Any, ids: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The logits for each of `parts` in turn.

    The first call runs the layers. Each later one gives the model a single token, and, in place of what the layers make
    of it, what they made of `ids`: so the logits are always made as the model makes them, scaled and capped.
    """
    made: list[torch.Tensor] = []

    def same_again(_module: Any, _inputs: Any, output: Any) -> Any:
        if not made:
            made.append(output.last_hidden_state)
        output.last_hidden_state = made[0]
        return output

    hook = model.get_decoder().register_forward_hook(same_again)
    try:
        for part in parts:
            yield _logits(model, ids[:, :1] if made else ids, part)
    finally:
        hook.remove()
