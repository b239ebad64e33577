"""LongCE: a loss that weights tokens by what they gain from distant context (Fang et al. 2024, arXiv 2410.23771)."""

from copy import copy
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from pi_lora.evaluation.context import near_context, near_losses
from pi_lora.evaluation.forward import pass_tokens, split_positions

# The greatest weight of a token (the paper's gamma).
MOST_WEIGHT = 5.0


def key_token_loss(model: Any, ids: torch.Tensor, *, bos: int | None) -> torch.Tensor:
    """Return the sum of the weighted losses in nats of the tokens of sequences (rows, length) after the first ones.

    The weight of a token is exp(near - far), at most `MOST_WEIGHT`: `far` is the loss with the whole sequence before
    it, and `near` the loss of the same weights with the near context alone, as `pi-lora eval context` cuts it. Tokens
    within the near context have the weight 1. Each near context begins with `bos`, if the model has one.
    """
    losses = [_weighted_loss(model, row, bos) for row in ids]
    return torch.stack(losses).sum()


def _weighted_loss(model: Any, row: torch.Tensor, bos: int | None) -> torch.Tensor:
    far = _losses(model, row[None])
    short_window = near_context(len(row))
    with torch.no_grad():
        near = near_losses(
            model,
            row.tolist(),
            short_window=short_window,
            stride=max(1, short_window // 2),
            bos=bos,
            tokens_at_once=pass_tokens(model),
        )
        gain = torch.zeros_like(far)
        # NaN where the near context is the whole one.
        gain[short_window - 1 :] = (near.to(far) - far[short_window - 1 :]).nan_to_num()
        weights = gain.exp().clamp(max=MOST_WEIGHT)
    return (weights * far).sum()


def _losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the losses in nats of the tokens of a sequence (1, length) after the first, with gradients: (length - 1).
    The logits are computed in parts, again in the backward pass, by the head of the model with any scaling or cap.
    """
    decoder = model.get_decoder()
    run_layers = decoder.forward
    output = decoder(input_ids=ids, use_cache=False)

    def losses_of(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        part = copy(output)
        part.last_hidden_state = hidden
        decoder.forward = lambda *_, **__: part
        try:
            logits = model(input_ids=targets, use_cache=False).logits
        finally:
            decoder.forward = run_layers
        return cross_entropy(logits[0].float(), targets[0], reduction="none")

    parts = []
    for positions in split_positions(model, ids, range(1, ids.shape[1])):
        hidden = output.last_hidden_state[:, positions - 1]
        parts.append(checkpoint(losses_of, hidden, ids[:, positions], use_reentrant=False))
    return torch.cat(parts)
