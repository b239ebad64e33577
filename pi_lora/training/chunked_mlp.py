"""Chunked MLPs: the same numbers from a few tokens at a time. Its four tensors of `tokens x intermediate`, the largest
of a layer under activation checkpointing, then exist for one piece of the sequence only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pi_lora.errors import ModelError

Run = Callable[[torch.Tensor], torch.Tensor]


def chunk_mlps(model: nn.Module, tokens: int) -> None:
    """Make the MLPs of `model` compute at most `tokens` tokens at a time, forward and backward."""
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] in ("mlp", "feed_forward")]
    dense = [mlp for mlp in found if not any(name.rpartition(".")[2] == "experts" for name, _ in mlp.named_modules())]
    if not dense:
        raise ModelError("training.mlp_chunk_tokens: the model has no dense MLP; leave the key out")
    for mlp in dense:
        mlp.forward = _in_pieces(mlp, mlp.forward, tokens)


def _in_pieces(mlp: nn.Module, run: Run, tokens: int) -> Run:
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        if flat.shape[1] <= tokens:
            return run(hidden)
        if not (torch.is_grad_enabled() and flat.requires_grad):
            return _joined(run, flat, tokens).view(hidden.shape)
        weights = [weight for weight in mlp.parameters() if weight.requires_grad]
        kept = _Kept.apply(flat).grad_fn  # type: ignore[no-untyped-call]
        output: torch.Tensor = _Pieces.apply(run, tokens, kept, flat, *weights)  # type: ignore[no-untyped-call]
        return output.view(hidden.shape)

    return forward


class _Kept(torch.autograd.Function):
    """Save the input of `_Pieces` before its forward, which ends the recomputation of a checkpointed layer ahead of the
    MLP (`early_stop` of torch 2.13's `checkpoint`); the backward of `_Pieces` recomputes the MLP in any case.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        return hidden.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        raise AssertionError("its empty output is never used")


class _Pieces(torch.autograd.Function):
    """`run` over pieces of `hidden` (1, tokens, hidden); the backward recomputes each piece."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, tokens: int, kept: Any, hidden: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.run, ctx.tokens, ctx.kept, ctx.weights = run, tokens, kept, weights
        ctx.autocast = torch.is_autocast_enabled(hidden.device.type), torch.get_autocast_dtype(hidden.device.type)
        return _joined(run, hidden, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (hidden,) = ctx.kept.saved_tensors
        into_hidden = torch.empty_like(hidden)
        # Summed in float32, whatever the weights are: there may be many pieces.
        into_weights = [torch.zeros_like(weight, dtype=torch.float32) for weight in ctx.weights]
        pieces = (each.split(ctx.tokens, dim=1) for each in (hidden, into_hidden, gradients[0]))
        for inputs, into_inputs, gradient in zip(*pieces, strict=True):
            piece = inputs.detach().requires_grad_()
            enabled, dtype = ctx.autocast  # as in the forward, without its cache of casted weights
            with torch.enable_grad(), torch.autocast(piece.device.type, dtype, enabled=enabled, cache_enabled=False):
                output = ctx.run(piece)
            found = torch.autograd.grad(output, [piece, *ctx.weights], gradient)
            into_inputs.copy_(found[0])
            for total, part in zip(into_weights, found[1:], strict=True):
                total += part
        cast = (total.to(weight.dtype) for total, weight in zip(into_weights, ctx.weights, strict=True))
        return None, None, None, into_hidden, *cast


def _joined(run: Run, hidden: torch.Tensor, tokens: int) -> torch.Tensor:
    return torch.cat([run(piece) for piece in torch.split(hidden, tokens, dim=1)], dim=1)
