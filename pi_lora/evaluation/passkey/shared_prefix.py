"""Inputs that begin alike: keys and values of what they share are computed once.

Attention is causal, so the keys and values of an input's first tokens are those of the same tokens in any other input.
Not so where a model's frequencies follow the length of its input, nor where layers keep something else than the keys
and values of all tokens (sliding windows, state spaces): those models get every input whole.
"""

import contextlib
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

# Tokens of a forward pass: enough to keep the hardware busy, few enough to stay in a processor's own caches.
PASS_TOKENS_ON_CPU = 2048
PASS_TOKENS_ON_GPU = 16384
# Tokens, shared ones included, of the inputs that go through a model together: what bounds the memory of their keys.
HELD_TOKENS = 16384


class FilledError(Exception):
    """The last layer has its keys and values: what a forward pass would do beyond that is not asked for."""


class SharedLayer(DynamicLayer):
    """One layer of a cache: keys and values (1, heads, tokens, size) that all inputs share, and each input's own.

    What is shared is repeated for every input only while the layer attends to it. A forward pass ends with
    FilledError at a layer that is `closing`.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.shared = keys, values
        self.closing = False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Keep an input's own keys and values; all of them, the shared first."""
        own = super().update(key_states, value_states, *args, **kwargs)
        if self.closing:
            raise FilledError
        return tuple(
            torch.cat([shared.expand(len(each), -1, -1, -1), each], dim=-2)
            for shared, each in zip(self.shared, own, strict=True)
        )

    def get_seq_length(self) -> int:
        """Tokens that an input's next ones stand behind."""
        return int(self.shared[0].shape[-2] + super().get_seq_length())


class SharedPrefix:
    """The keys and values of `ids`, with which inputs may begin, for a model that can share them."""

    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        self.model, self.ids = model, ids
        tokens = torch.tensor([ids], device=model.device)
        cache = model(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values
        plain = type(cache) is DynamicCache and all(
            type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers
        )
        self.layers: list[DynamicLayer] = cache.layers if plain else []

    def length_in(self, rows: Sequence[Sequence[int]]) -> int:
        """How many tokens every row begins with that `ids` begins with too; 0 if the model cannot share them.

        They are compared, never presumed: what a tokenizer makes of a text may depend on what follows.
        """
        if not self.layers:
            return 0
        same = takewhile(lambda column: len(set(column)) == 1, zip(self.ids, *rows, strict=False))
        return sum(1 for _ in same)

    def cache(self, length: int) -> Cache:
        """A cache for inputs that begin with the first `length` tokens."""
        return Cache(
            layers=[SharedLayer(layer.keys[..., :length, :], layer.values[..., :length, :]) for layer in self.layers]
        )


@torch.no_grad()
def last_logits(model: Any, rows: Sequence[Sequence[int]], tail: int, prefix: SharedPrefix | None) -> torch.Tensor:
    """The logits of the last `tail` positions of token ids: (rows, tail, vocabulary). Short rows end in padding.

    Every row must have a token of its own before its last `tail - 1`.
    """
    width = max(map(len, rows))
    # Causal attention: what is padded on the right changes nothing before it.
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=model.device)
    shared = min(prefix.length_in(rows), width - tail) if prefix else 0
    if prefix is None or not shared:
        whole: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=tail).logits
        return whole
    cache = prefix.cache(shared)
    *others, last = _pieces(ids[:, shared:], max(2 * tail, pass_tokens(model) // len(rows)))
    for piece in others:
        _fill(model, piece, cache)
    made: torch.Tensor = model(input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=tail).logits
    return made


def rows_at_once(model: Any, width: int, prefix: SharedPrefix | None) -> int:
    """How many inputs of `width` tokens should go through a model together."""
    whole = prefix is None or not prefix.layers
    return max(1, (pass_tokens(model) if whole else HELD_TOKENS) // width)


def pass_tokens(model: Any) -> int:
    """How many tokens should go through a model at once."""
    return PASS_TOKENS_ON_CPU if model.device.type == "cpu" else PASS_TOKENS_ON_GPU


def _fill(model: Any, piece: torch.Tensor, cache: Cache) -> None:
    """Put keys and values of a piece of the inputs into `cache`; the rest of the last layer is left out."""
    last = cache.layers[-1]
    last.closing = True
    with contextlib.suppress(FilledError):
        model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    last.closing = False


def _pieces(ids: torch.Tensor, length: int) -> Sequence[torch.Tensor]:
    """`ids` (rows, tokens) cut into pieces of at most `length` tokens, none shorter than half of it but a lone one.

    A piece attends to all before it through a mask whose upper half is computed in vain: the shorter, the smaller.
    """
    return ids.tensor_split(-(-ids.shape[1] // length), dim=1)
