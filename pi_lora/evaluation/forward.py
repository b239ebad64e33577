"""Forward passes of long inputs in bounded memory: padding, logits in parts, and shared prefixes."""

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from pi_lora.errors import ModelError
from pi_lora.models.device import free_memory
from pi_lora.models.loaded import LoadedModel

# Tokens of a forward pass that keep a GPU busy; on a CPU, as many as stay in the caches.
PASS_TOKENS = 16384
PASS_TOKENS_ON_CPU = 2048
# Tokens of the prompts that are continued together, which bounds the memory of the KV cache.
HELD_TOKENS = 16384
# Logits in memory at a time; a window of 32k tokens over a vocabulary of 128k has 4 billion.
LOGITS = 2**28
LOGITS_ON_CPU = 2**25
# Logits that become float32 at a time on a CPU: 8 MiB stay in the caches, and in memory that is not mapped anew.
FLOAT_LOGITS_ON_CPU = 2**21
# The largest share of the free memory for keys and values; the rest is for the forward pass.
SHARE_OF_MEMORY = 0.75
# The most pairs of tokens in the mask of a pass that continues a cache. A pair takes a byte, or two in some kernels.
MASKED_PAIRS = 2**27


def check_numbers(loaded: LoadedModel, finite: bool) -> None:
    """Raise ModelError unless the numbers that a model gave are `finite`."""
    if not finite:
        raise ModelError(f"{loaded.name}: gives infinite or NaN numbers in {loaded.dtype}; try another --dtype")


def pass_tokens(model: Any) -> int:
    """Return the tokens of a forward pass that keep a model's device busy."""
    return PASS_TOKENS_ON_CPU if model.device.type == "cpu" else PASS_TOKENS


def prompts_at_once(loaded: LoadedModel, window: int, requested: int | None) -> int:
    """Return how many prompts are continued together, in RULER and in summaries: `requested`, or as many as fit. It is
    one if the longest prompt of a batch would change the rotary frequencies of the others.
    """
    if loaded.source.rope.depends_on_length:
        return 1
    return requested or max(1, HELD_TOKENS // window)


def is_sharded(model: Any) -> bool:
    """Whether FSDP2 has sharded a model over processes."""
    return isinstance(model, FSDPModule)


def pad_rows(model: Any, rows: Sequence[Sequence[int]], padding: int = 0, side: str = "right") -> torch.Tensor:
    """Return token ids (rows, longest), by default padded on the right, where causal attention needs no mask."""
    tensors = [torch.tensor(row) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_value=padding, padding_side=side)
    return ids.to(model.device)


def token_losses(model: Any, ids: torch.Tensor, positions: Sequence[int], **inputs: torch.Tensor) -> torch.Tensor:
    """Return the losses in nats of the tokens at `positions` of `ids` (rows, length): (rows, positions), on the CPU. A
    gradient flows back unless gradients are off. The model gets other `inputs` as well.
    """
    parts = split_positions(model, ids, positions)

    def losses_of(logits: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return _losses(logits.flatten(0, 1), ids[:, part].flatten()).view(len(ids), -1)

    # A loop over `zip` would hold the logits of a part while those of the next are computed.
    losses = map(losses_of, logits_in_parts(model, ids, parts, **inputs), parts)
    return torch.cat(list(losses), dim=1).cpu()


def _losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the losses of tokens (tokens), whose logits (tokens, vocabulary) become float32 a few at a time."""
    tokens = len(targets)
    if logits.device.type == "cpu":
        tokens = max(1, FLOAT_LOGITS_ON_CPU // logits.shape[-1])
    pairs = zip(torch.split(logits, tokens), torch.split(targets, tokens), strict=True)
    return torch.cat([cross_entropy(some.float(), of_some, reduction="none") for some, of_some in pairs])


def split_positions(model: Any, ids: torch.Tensor, positions: Sequence[int]) -> Sequence[torch.Tensor]:
    """Split positions of `ids` (rows, length) into parts whose logits fit into memory together."""
    tensor = torch.tensor(positions, device=ids.device)
    if not isinstance(model.get_decoder(), PreTrainedModel):
        return [tensor]  # in ModernBERT's decoder, `get_decoder` returns the head (transformers 5.23)
    most_logits = LOGITS_ON_CPU if ids.device.type == "cpu" else LOGITS
    logits_per_position = len(ids) * model.config.get_text_config().vocab_size
    return torch.split(tensor, max(1, most_logits // logits_per_position))


def logits_in_parts(
    model: Any, ids: torch.Tensor, parts: Sequence[torch.Tensor], **inputs: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Yield the logits that predict the tokens at the positions of each part, from the positions before them.

    The first call runs all layers. In later calls the decoder returns its first output again. So the model's own head
    computes the logits, with any scaling and capping.
    """
    decoder = model.get_decoder()
    run_layers = decoder.forward
    outputs: list[Any] = []

    def run_once(*inputs: Any, **options: Any) -> Any:
        if not outputs:
            outputs.append(run_layers(*inputs, **options))
        return outputs[0]

    decoder.forward = run_once
    try:
        for part in parts:
            yield model(input_ids=ids, use_cache=False, logits_to_keep=part - 1, **inputs).logits
    finally:
        decoder.forward = run_layers


class SharedPrefix(NamedTuple):
    """The keys and values of `ids`, with which inputs may begin. As attention is causal, later tokens do not change
    them.
    """

    ids: Sequence[int]
    cache: DynamicCache


@torch.no_grad()
def shared_prefix(model: Any, ids: Sequence[int], length: int) -> SharedPrefix | None:
    """Compute the prefix that inputs of up to `length` tokens share. Return None for a model that cannot share it, and
    if memory does not hold the keys and values of prefix and input. A sharded model has no memory planned for them.
    """
    if is_sharded(model):
        return None
    first_token = _cache_of(model, ids[:1])
    if first_token is None:
        return None
    bytes_per_token = sum(layer.keys.nbytes + layer.values.nbytes for layer in first_token.layers)
    needed = bytes_per_token * (len(ids) + length)
    if needed > SHARE_OF_MEMORY * free_memory(model.device):
        return None
    cache = _cache_of(model, ids)
    return SharedPrefix(ids, cache) if cache else None


def _cache_of(model: Any, ids: Sequence[int]) -> DynamicCache | None:
    """Return the cache after `ids`; None unless it keeps all tokens."""
    tokens = torch.tensor([ids], device=model.device)
    cache = model(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values
    return cache if keeps_all_tokens(cache) else None


def keeps_all_tokens(cache: Any) -> bool:
    """Whether all layers keep the keys and values of all tokens; sliding windows and state spaces do not."""
    if type(cache) is not DynamicCache:
        return False
    return all(type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers)


@torch.no_grad()
def last_logits(model: Any, ids: Sequence[int], tail: int, prefix: SharedPrefix | None) -> torch.Tensor:
    """Return the logits of the last `tail` positions of an input: (tail, vocabulary). At least one token before the
    last `tail - 1` must lie beyond the prefix.
    """
    row = torch.tensor([ids], device=model.device)
    # Tokens are compared: at the end of the prefix, the text behind it may change tokens.
    shared = len([*takewhile(bool, map(eq, prefix.ids, ids[:-tail]))]) if prefix else 0
    cache = None
    if prefix and shared:
        cache = deepcopy(prefix.cache)
        cache.crop(shared - len(prefix.ids))
        # Chunks of about equal length, as every chunk attends to all tokens before it.
        chunk_tokens = max(2 * tail, min(pass_tokens(model), MASKED_PAIRS // len(ids)))
        chunks = math.ceil((len(ids) - shared) / chunk_tokens)
        *first_chunks, row = row[:, shared:].tensor_split(chunks, dim=1)
        for chunk in first_chunks:
            model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
    output = model(input_ids=row, past_key_values=cache, use_cache=cache is not None, logits_to_keep=tail)
    logits: torch.Tensor = output.logits[0]
    return logits
