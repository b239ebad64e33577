"""Forward passes of long inputs in bounded memory: padding, logits in parts, and prefixes that inputs share."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from pi_lora.errors import ModelError
from pi_lora.models.machine import free_memory
from pi_lora.models.model import Model
from pi_lora.scaling.config import Config, constant_longrope, full_attention_rope

# Tokens that keep the hardware busy in a forward pass, and stay in a processor's caches.
PASS_TOKENS, PASS_TOKENS_ON_CPU = 16384, 2048
# Tokens of the prompts that are continued together: this bounds the memory of their keys.
HELD_TOKENS = 16384
# Logits in memory at a time; a window of 32k tokens over a vocabulary of 128k has 4 billion.
LOGITS, LOGITS_ON_CPU = 2**28, 2**25
# Of the memory that is free, the most that keys and values may take; the rest is for the forward pass.
SHARE_OF_MEMORY = 0.75
# Pairs of tokens in the mask of a pass that continues a cache, at most; a byte each, or two where a kernel adds it.
MASKED_PAIRS = 2**27


def check_numbers(loaded: Model, finite: bool) -> None:
    """Raise ModelError unless what was measured of a model is `finite`."""
    if not finite:
        raise ModelError(f"{loaded.name}: gives infinite or NaN numbers in {loaded.dtype}; try another --dtype")


def pass_tokens(model: Any) -> int:
    """Return how many tokens keep the hardware busy in a forward pass, and stay in a processor's caches."""
    return PASS_TOKENS_ON_CPU if model.device.type == "cpu" else PASS_TOKENS


def prompts_at_once(window: int) -> int:
    """Return how many prompts of RULER are continued together by default."""
    return max(1, HELD_TOKENS // window)


def is_sharded(model: Any) -> bool:
    """Whether FSDP2 has spread a model over processes."""
    return isinstance(model, FSDPModule)


def padded(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return token ids (rows, longest) padded on the right, which needs no mask: attention is causal."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=model.device)


def depends_on_length(config: Config) -> bool:
    """Return whether the length of an input changes how a model computes its first tokens: rope follows the length."""
    rope = full_attention_rope(config)
    return rope.get("rope_type") in ("dynamic", "longrope") and constant_longrope(rope) is None


@torch.no_grad()
def forget_lengths(loaded: Model) -> None:
    """Reset `dynamic` frequencies: transformers keeps those of the longest input until one shorter than L comes."""
    if depends_on_length(loaded.config):
        first = torch.zeros((1, 1), dtype=torch.long, device=loaded.model.device)
        loaded.model(input_ids=first, use_cache=False)


@torch.no_grad()
def token_losses(model: Any, ids: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Return the losses in nats of the tokens at `tokens` of `ids` (rows, length): (rows, tokens), on the CPU."""
    parts = in_parts(model, ids, tokens)
    losses = [
        cross_entropy(logits.float().flatten(0, 1), ids[:, part].flatten(), reduction="none").view(len(ids), -1)
        for part, logits in zip(parts, logits_at(model, ids, parts), strict=True)
    ]
    return torch.cat(losses, dim=1).cpu()


def in_parts(model: Any, ids: torch.Tensor, tokens: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return places of `ids` (rows, length) in parts whose logits fit into memory together."""
    places = torch.tensor(tokens, device=ids.device)
    at_once = LOGITS_ON_CPU if ids.device.type == "cpu" else LOGITS
    size = max(1, at_once // (len(ids) * model.config.get_text_config().vocab_size))
    # What ModernBERT's decoder calls its decoder is its head (transformers 5.23).
    return torch.split(places, size if isinstance(model.get_decoder(), PreTrainedModel) else len(places))


def logits_at(model: Any, ids: torch.Tensor, parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the logits that predict the tokens at each of `parts`: those of the positions before them. The first call
    runs the layers. Each later one gives the model a single token and replaces the decoder's output by that of the
    first: the head, with any scaling and capping, stays the model's own.
    """
    made: list[torch.Tensor] = []

    def reuse_output(_module: Any, _inputs: Any, output: Any) -> Any:
        if not made:
            made.append(output.last_hidden_state)
        output.last_hidden_state = made[0]
        return output

    hook = model.get_decoder().register_forward_hook(reuse_output) if len(parts) > 1 else nullcontext()
    with hook:
        for part in parts:
            yield model(input_ids=ids[:, :1] if made else ids, use_cache=False, logits_to_keep=part - 1).logits


class SharedPrefix(NamedTuple):
    """The keys and values of `ids`, with which inputs may begin: as attention is causal, what follows changes none."""

    ids: Sequence[int]
    kept: DynamicCache


def without_end(tokenizer: Any, ids: Any) -> Any:
    """Return the tokens of a text without the EOS that some tokenizers add."""
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


@torch.no_grad()
def shared_prefix(model: Any, ids: Sequence[int], length: int) -> SharedPrefix | None:
    """Return what inputs of up to `length` tokens share; None for a model that cannot share it, without room for its
    keys and values next to those of an input, and for a sharded model, whose plan leaves none.
    """
    if is_sharded(model) or (first := _cache_of(model, ids[:1])) is None:
        return None
    per_token = sum(layer.keys.nbytes + layer.values.nbytes for layer in first.layers)
    needed = per_token * (len(ids) + length)
    if needed > SHARE_OF_MEMORY * free_memory(model.device):
        return None
    cache = _cache_of(model, ids)
    return SharedPrefix(ids, cache) if cache else None


def _cache_of(model: Any, ids: Sequence[int]) -> DynamicCache | None:
    """The cache after `ids`; None if a layer keeps something else than the keys and values of all tokens, as sliding
    windows and state spaces do.
    """
    tokens = torch.tensor([ids], device=model.device)
    cache = model(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values
    plain = type(cache) is DynamicCache and all(
        type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers
    )
    return cache if plain else None


@torch.no_grad()
def last_logits(model: Any, ids: Sequence[int], tail: int, prefix: SharedPrefix | None) -> torch.Tensor:
    """Return the logits of the last `tail` positions of an input: (tail, vocabulary). It must have a token of its own
    before its last `tail - 1`.
    """
    row = torch.tensor([ids], device=model.device)
    # Compared, as what follows may change tokens.
    shared = len([*takewhile(bool, map(eq, prefix.ids, ids[:-tail]))]) if prefix else 0
    if prefix is None or not shared:
        made = model(input_ids=row, use_cache=False, logits_to_keep=tail)
    else:
        cache, own = deepcopy(prefix.kept), row[:, shared:]
        cache.crop(shared - len(prefix.ids))
        # Pieces of about equal length: each attends to all before it.
        size = max(2 * tail, min(pass_tokens(model), MASKED_PAIRS // len(ids)))
        *others, last = own.tensor_split(-(-own.shape[1] // size), dim=1)
        for piece in others:
            model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        made = model(input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=tail)
    logits: torch.Tensor = made.logits[0]
    return logits
