"""The loss on a CPU: from the logits of some tokens at a time, whose gradients are computed at once and overwrite them.

A loss from all logits has them three more times, in float32, and on a CPU such memory costs more time than the
arithmetic. Gradients come from the forward pass as in Liger's fused linear cross-entropy (Hsu et al. 2024).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from pi_lora.planning.memory import LOSS_TOKENS

# Logits that become float32 at a time: 2 MiB stay in the caches.
FLOAT_LOGITS = 2**19
# The label of a token without a loss.
IGNORED = -100


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


def compute_loss_in_place(model: Any) -> None:
    """Make a causal language model return only its loss, computed in place, when it is called with labels."""
    whole_forward = model.forward

    def forward(*args: Any, labels: torch.Tensor | None = None, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        if labels is None:
            return whole_forward(*args, **inputs)
        outputs = model.base_model(*args, **inputs)
        labels = labels[:, 1:]
        has_loss = labels != IGNORED
        states = outputs.last_hidden_state[:, :-1][has_loss]
        targets = labels[has_loss]
        num_targets = len(targets) if num_items_in_batch is None else num_items_in_batch

        def logits_of(some: torch.Tensor) -> torch.Tensor:
            # The model's own forward scales and caps logits. Its layers return `some` hidden states.
            outputs.last_hidden_state = some[None]
            logits: torch.Tensor = whole_forward(*args, **inputs).logits[0]
            return logits

        weights = [weight for weight in model.get_output_embeddings().parameters() if weight.requires_grad]
        run_layers = model.base_model.forward
        model.base_model.forward = lambda *_, **__: outputs
        try:
            loss, gradients = loss_and_gradients(logits_of, states.detach(), weights, targets, num_targets)
        finally:
            model.base_model.forward = run_layers
        return (LossWithGradients.apply(loss, gradients, states, *weights),)

    model.forward = forward


def loss_and_gradients(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    weights: Sequence[torch.Tensor],
    targets: torch.Tensor,
    num_targets: Any,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the sum of the losses of `targets` over their number, and its gradients for the hidden states (tokens,
    hidden) and for weights of the head.
    """
    loss = torch.zeros(())
    state_gradients = torch.empty_like(states)
    weight_gradients: list[torch.Tensor] = []
    pieces = zip(states.split(LOSS_TOKENS), state_gradients.split(LOSS_TOKENS), targets.split(LOSS_TOKENS), strict=True)
    for some, state_gradient, answers in pieces:
        logits = logits_of(some.requires_grad_())
        loss += replace_by_gradients(logits.detach(), answers, num_targets)
        gradient, *others = torch.autograd.grad(logits, (some, *weights), logits.detach())
        state_gradient.copy_(gradient)
        if weight_gradients:
            for total, part in zip(weight_gradients, others, strict=True):
                total += part
        else:
            weight_gradients = [part.float() for part in others]
    return loss, [state_gradients, *weight_gradients]


def replace_by_gradients(logits: torch.Tensor, targets: torch.Tensor, num_targets: Any) -> torch.Tensor:
    """Return the sum of the losses of `targets` over their number, and write its gradients over the logits."""
    loss = torch.zeros(())
    tokens = max(1, FLOAT_LOGITS // logits.shape[-1])
    for some, answers in zip(logits.split(tokens), targets.split(tokens), strict=True):
        numbers = some.float().detach().requires_grad_()
        part = cross_entropy(numbers, answers, reduction="sum") / num_targets
        (gradient,) = torch.autograd.grad(part, numbers)
        some.copy_(gradient)
        loss += part.detach()
    return loss
