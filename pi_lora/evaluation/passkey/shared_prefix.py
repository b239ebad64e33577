"""Inputs that begin alike share the keys and values of what they begin with, as attention is causal; unless frequencies
follow the length of the input, or layers keep something else (sliding windows, state spaces).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pi_lora.evaluation.forward import HELD_TOKENS, is_sharded, padded, pass_tokens
from pi_lora.models.machine import free_memory

# Of the memory that is free, the most that keys and values may take; the rest is for the forward pass.
SHARE_OF_MEMORY = 0.75
LOWER_RIGHT = "pi_lora_lower_right"
# Pairs of tokens in the mask of a pass that continues a cache, at most; a byte each, or two where a kernel adds it.
MASKED_PAIRS = 2**27


@dataclass
class SharedPrefix:
    """The keys and values of `ids`, with which inputs may begin."""

    ids: Sequence[int]
    kept: DynamicCache

    def length_in(self, rows: Sequence[Sequence[int]]) -> int:
        """Return how many first tokens all rows share with `ids`: compared, as what follows may change tokens."""
        same = takewhile(lambda column: len(set(column)) == 1, zip(self.ids, *rows, strict=False))
        return sum(1 for _ in same)

    def cache(self, length: int, rows: int) -> DynamicCache:
        """Return a cache for `rows` inputs that begin with the first `length` tokens."""
        cache = deepcopy(self.kept)
        cache.crop(length - len(self.ids))
        for layer in cache.layers:  # `batch_repeat_interleave` would copy what each layer copies again
            layer.keys, layer.values = (each.expand(rows, -1, -1, -1) for each in (layer.keys, layer.values))
        return cache


@torch.no_grad()
def shared_prefix(model: Any, ids: Sequence[int], length: int) -> SharedPrefix | None:
    """Return what inputs of up to `length` tokens share; None for a model that cannot share it, without room for its
    keys and values beside those of the inputs, and for a sharded model, whose plan leaves none.
    """
    if is_sharded(model) or (first := _cache_of(model, ids[:1])) is None:
        return None
    per_token = sum(layer.keys.nbytes + layer.values.nbytes for layer in first.layers)
    needed = per_token * (len(ids) + max(length, HELD_TOKENS))
    if needed > SHARE_OF_MEMORY * free_memory(model.device):
        return None
    cache = _cache_of(model, ids)
    return SharedPrefix(ids, cache) if cache else None


def _cache_of(model: Any, ids: Sequence[int]) -> DynamicCache | None:
    """The cache after `ids`; None if a layer keeps something else than the keys and values of all tokens."""
    tokens = torch.tensor([ids], device=model.device)
    cache = model(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values
    plain = type(cache) is DynamicCache and all(
        type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers
    )
    return cache if plain else None


@torch.no_grad()
def last_logits(model: Any, rows: Sequence[Sequence[int]], tail: int, prefix: SharedPrefix | None) -> torch.Tensor:
    """Return the logits of the last `tail` positions of token ids: (rows, tail, vocabulary). Short rows are padded.
    Every row must have a token of its own before its last `tail - 1`.
    """
    ids = padded(model, rows)
    shared = min(prefix.length_in(rows), ids.shape[1] - tail) if prefix else 0
    if prefix is None or not shared:
        return cast(torch.Tensor, model(input_ids=ids, use_cache=False, logits_to_keep=tail).logits)
    cache, own = prefix.cache(shared, len(rows)), ids[:, shared:]
    # Pieces of about equal length: each attends to all before it.
    size = max(2 * tail, min(pass_tokens(model), MASKED_PAIRS // ids.shape[1]) // len(rows))
    *others, last = own.tensor_split(-(-own.shape[1] // size), dim=1)
    with without_mask(model) if model.device.type == "cuda" else nullcontext():
        for piece in others:
            model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        made = model(input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=tail)
    return cast(torch.Tensor, made.logits)


@contextmanager
def without_mask(model: Any) -> Iterator[None]:
    """Let a model continue a cache by torch's kernels that need no mask of all pairs of tokens (`causal_lower_right`);
    a mask rules out the fastest ones on a GPU, and a CPU would make it anew in every layer.
    """
    kernel = model.config._attn_implementation
    if kernel == "sdpa":
        model.set_attn_implementation(LOWER_RIGHT)
    try:
        yield
    finally:
        model.set_attn_implementation(kernel)


def _lower_right(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: torch.Tensor | None, **others: Any
) -> tuple[torch.Tensor, None]:
    bias = causal_lower_right(query.shape[2], key.shape[2])
    output: torch.Tensor = sdpa_attention_forward(module, query, key, value, bias, **{**others, "is_causal": False})[0]
    return output, None


AttentionInterface.register(LOWER_RIGHT, _lower_right)
