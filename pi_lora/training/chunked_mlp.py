"""Chunked MLPs: the same numbers from a few tokens at a time. Its four tensors of `tokens x intermediate`, the largest
of a layer under activation checkpointing, then exist for one piece of the sequence only.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pi_lora.errors import ModelError

Run = Callable[[torch.Tensor], torch.Tensor]


def chunk_mlps(model: nn.Module, tokens: int) -> None:
    """Make the MLPs of `model` compute at most `tokens` tokens at a time, forward and backward."""
    mlps = [module for name, module in model.named_modules() if name.rpartition(".")[2] in ("mlp", "feed_forward")]
    dense = [mlp for mlp in mlps if not any(name.rpartition(".")[2] == "experts" for name, _ in mlp.named_modules())]
    if not dense:
        raise ModelError("training.mlp_chunk_tokens: the model has no dense MLP; leave the key out")
    for mlp in dense:
        mlp.forward = _in_pieces(mlp.forward, tokens)


def _in_pieces(run: Run, tokens: int) -> Run:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        pieces = torch.split(hidden.reshape(1, -1, hidden.shape[-1]), tokens, dim=1)
        if len(pieces) == 1:
            return run(hidden)
        if torch.is_grad_enabled():
            outputs = [checkpoint(alone, piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
        else:
            outputs = [run(piece) for piece in pieces]
        return torch.cat(outputs, dim=1).view(hidden.shape)

    def alone(piece: torch.Tensor) -> torch.Tensor:
        # With one cast of a weight for all pieces, its gradients would be summed in bfloat16.
        device = piece.device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        with torch.autocast(device, dtype, enabled=enabled, cache_enabled=False):
            return run(piece)

    return forward
