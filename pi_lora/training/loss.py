"""The loss on a CPU: from the logits of some tokens at a time, whose gradients are computed at once and overwrite them.

A loss from all logits has them three more times, in float32, and on a CPU such memory costs more time than the
arithmetic. Gradients come from the forward pass as in Liger's fused linear cross-entropy (Hsu et al. 2024).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from pi_lora.data.batches import IGNORED
from pi_lora.planning.memory import FLOAT_LOGITS, LOSS_TOKENS


def compute_loss_in_place(model: Any) -> None:
    """Make a causal language model return only its loss, computed in place, when it is called with labels."""
    whole_forward = model.forward

    def forward(*args: Any, labels: torch.Tensor | None = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        if labels is None:
            return whole_forward(*args, **inputs)
        layers = model.base_model
        outputs = layers(*args, **inputs)
        next_labels = labels[:, 1:]
        has_loss = next_labels != IGNORED
        states = outputs.last_hidden_state[:, :-1][has_loss]
        targets = next_labels[has_loss]
        num_targets = num_items_in_batch or len(targets)
        weights = [weight for weight in model.get_output_embeddings().parameters() if weight.requires_grad]
        detached = states.detach().requires_grad_()
        tensors = [detached, *weights]
        gradients = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors]
        loss = torch.zeros(())
        run_layers = layers.forward
        # The model's own forward scales and caps the logits. Its layers return a piece of their output.
        layers.forward = lambda *_, **__: outputs
        pieces = torch.split(detached, LOSS_TOKENS)
        answers_of_pieces = torch.split(targets, LOSS_TOKENS)
        for piece, answers in zip(pieces, answers_of_pieces, strict=True):
            outputs.last_hidden_state = piece[None]
            logits = whole_forward(*args, **inputs).logits
            numbers = logits.detach()
            loss += replace_by_gradients(numbers[0], answers, num_targets)
            parts = torch.autograd.grad(logits, tensors, numbers)
            for gradient, part in zip(gradients, parts, strict=True):
                gradient += part
            del logits, numbers, parts, part  # before the next ones
        layers.forward = run_layers
        return (LossWithGradients.apply(loss, gradients, states, *weights),)  # type: ignore[no-untyped-call]

    model.forward = forward


def replace_by_gradients(logits: torch.Tensor, targets: torch.Tensor, num_targets: Any) -> torch.Tensor:
    """Return the sum of the losses over `num_targets`, and write the gradients over the logits (tokens, vocabulary)."""
    loss = torch.zeros(())
    tokens = max(1, FLOAT_LOGITS // logits.shape[-1])
    pieces = torch.split(logits, tokens)
    answers_of_pieces = torch.split(targets, tokens)
    for some, answers in zip(pieces, answers_of_pieces, strict=True):
        numbers = some.float().detach().requires_grad_()
        part = cross_entropy(numbers, answers, reduction="sum") / num_targets
        (gradient,) = torch.autograd.grad(part, numbers)
        some.copy_(gradient)
        loss += part.detach()
    return loss


class LossWithGradients(torch.autograd.Function):
    """A loss whose gradients are known: the backward pass scales them."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, gradients: Sequence[torch.Tensor], *_: torch.Tensor) -> torch.Tensor:
        """Return the loss; the other tensors are those that the gradients belong to."""
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, scaled."""
        return None, None, *(gradient.mul_(scale) for gradient in ctx.saved_tensors)
