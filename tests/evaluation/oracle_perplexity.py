"""Sliding-window perplexity (Press et al. 2022) as plainly as it can be written: slow, and the truth in tests."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


def losses_by_token(
    model: Callable[..., Any], document: Sequence[int], window: int, stride: int, bos: int | None = None
) -> list[tuple[int, int, float]]:
    """One window a forward pass, all its logits, one token at a time: (token, tokens before it in its window, loss).
    The first token of a window is `bos`, as in llama.cpp's perplexity, or that of the document.
    """
    found: list[tuple[int, int, float]] = []
    scored_to = 1
    for start in range(0, len(document), stride):
        end = min(start + window, len(document))
        first = document[start] if bos is None else bos
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[first, *document[start + 1 : end]]])).logits[0]
        log_probabilities = logits.double().log_softmax(-1)
        for token in range(max(scored_to, start + 1), end):
            before = token - start
            found.append((token, before, -log_probabilities[before - 1, document[token]].item()))
        scored_to = end
        if end == len(document):
            break
    return found


def perplexity(
    model: Callable[..., Any],
    documents: Sequence[Sequence[int]],
    window: int,
    stride: int,
    bos: int | None = None,
) -> tuple[float, int]:
    """Over all scored tokens of all documents, each weighted equally; and how many there are."""
    losses = [loss for document in documents for _, _, loss in losses_by_token(model, document, window, stride, bos)]
    return math.exp(sum(losses) / len(losses)), len(losses)
