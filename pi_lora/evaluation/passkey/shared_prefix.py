"""Inputs that begin alike: the keys and values of what they share are computed once, as attention is causal. Models
get every input whole where frequencies follow its length, or layers keep something else than the keys and values of all
tokens (sliding windows, state spaces).
"""

import contextlib
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, cast

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from pi_lora.evaluation.forward import padded, pass_tokens

# Tokens, shared ones included, of the inputs that go through a model together: what bounds the memory of their keys.
HELD_TOKENS = 16384
# Pairs of tokens in the mask of a pass that continues a cache, at most; a byte each, or two where a kernel adds it.
MASKED_PAIRS = 2**27


class FilledError(Exception):
    """Ends a forward pass once the last layer has its keys and values: nothing beyond them is needed."""


class SharedLayer(DynamicLayer):
    """One layer of a cache: keys and values (1, heads, tokens, size) that all inputs share, repeated for each only
    while the layer attends to them, and each input's own. A `closing` layer ends the forward pass with FilledError.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.shared = keys, values
        self.closing = False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Keep an input's own keys and values; return all of them, the shared first."""
        own = super().update(key_states, value_states, *args, **kwargs)
        if self.closing:
            raise FilledError
        return tuple(
            torch.cat([shared.expand(len(each), -1, -1, -1), each], dim=-2)
            for shared, each in zip(self.shared, own, strict=True)
        )

    def get_seq_length(self) -> int:
        """Return how many tokens precede an input's next ones."""
        return int(self.shared[0].shape[-2] + super().get_seq_length())


class SharedPrefix:
    """The keys and values of `ids`, with which inputs may begin; none for a model that cannot share them."""

    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        self.model, self.ids = model, ids
        tokens = torch.tensor([ids], device=model.device)
        cache = model(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values
        plain = type(cache) is DynamicCache and all(
            type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers
        )
        self.layers: list[DynamicLayer] = cache.layers if plain else []

    def length_in(self, rows: Sequence[Sequence[int]]) -> int:
        """Return how many first tokens all rows share with `ids`: compared, as what follows may change tokens."""
        same = takewhile(lambda column: len(set(column)) == 1, zip(self.ids, *rows, strict=False))
        return sum(1 for _ in same) if self.layers else 0

    def cache(self, length: int) -> Cache:
        """Return a cache for inputs that begin with the first `length` tokens."""
        shared = ((layer.keys[..., :length, :], layer.values[..., :length, :]) for layer in self.layers)
        return Cache(layers=[SharedLayer(*each) for each in shared])


@torch.no_grad()
def last_logits(model: Any, rows: Sequence[Sequence[int]], tail: int, prefix: SharedPrefix | None) -> torch.Tensor:
    """Return the logits of the last `tail` positions of token ids: (rows, tail, vocabulary). Short rows are padded.
    Every row must have a token of its own before its last `tail - 1`.
    """
    ids = padded(model, rows)
    shared = min(prefix.length_in(rows), ids.shape[1] - tail) if prefix else 0
    if prefix is None or not shared:
        return cast(torch.Tensor, model(input_ids=ids, use_cache=False, logits_to_keep=tail).logits)
    cache = prefix.cache(shared)
    own = ids[:, shared:]
    # Pieces of about equal length: each attends to all before it through a mask whose upper half is computed in vain.
    size = max(2 * tail, min(pass_tokens(model), MASKED_PAIRS // ids.shape[1]) // len(rows))
    *others, last = own.tensor_split(-(-own.shape[1] // size), dim=1)
    for piece in others:  # the rest of the last layer is skipped
        cache.layers[-1].closing = True
        with contextlib.suppress(FilledError):
            model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.layers[-1].closing = False
    made = model(input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=tail)
    return cast(torch.Tensor, made.logits)


def rows_at_once(model: Any, width: int, prefix: SharedPrefix | None) -> int:
    """Return how many inputs of `width` tokens go through a model together."""
    whole = prefix is None or not prefix.layers
    return max(1, (pass_tokens(model) if whole else HELD_TOKENS) // width)
