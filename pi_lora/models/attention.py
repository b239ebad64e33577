"""Attention in blocks of queries: sliding windows, chunks, sinks or soft caps, exactly as the config says.

transformers' `sdpa` gives a layer with a sliding window a mask of queries x keys, and refuses models with attention
sinks or soft caps. Here a block of queries meets only the keys that it can see, so that a layer with a window of w
tokens takes O(n w) time and memory instead of O(n^2). Plain causal layers run transformers' `sdpa` as it is.

`AttentionInterface` and `AttentionMaskInterface` of transformers know the kernel as `blockwise`. A model passes the
mask function of each layer type, which knows windows, chunks, padding and packed sequences, and this module asks it
about one block at a time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from pi_lora.scaling.config import FULL_ATTENTION, LOCAL_ATTENTION

BLOCKWISE = "blockwise"
# Queries and keys of a block: at most so many, and no more than the window (measured on a CPU: half a window of 512
# tokens, and a whole one of 128, are the fastest).
BLOCK = 256
# On a GPU, whose kernels want work: 2.3 times as fast as 256 (an H200, Gemma 2 and 3 at 16,384 tokens).
BLOCK_ON_GPU = 1024
# Kernels are fast for widths that are multiples of 8.
SINK_CHANNELS = 8
# Models that index or add to masks themselves, and need them as tensors. No config says so.
MAKE_OWN_MASKS = {"axk2", "deepseek_v32", "deepseek_v4", "doge", "dots3_note_text", "glm_moe_dsa", "hy_v4"}

# Models whose layers pass the bounds of packed sequences to no kernel.
WITHOUT_BOUNDS = {"nemotron", "stablelm"}

# Whether a query sees a key, from the indices of batch, head, query and key, which broadcast.
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Block(NamedTuple):
    """Some queries, and the keys that they can see."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class BlockwiseMask:
    """Which keys the queries see, evaluated for one block at a time.

    Attributes:
        sees: The mask function of transformers.
        batch: The number of sequences.
        queries: The indices of the queries in the sequence; with a cache they do not begin at 0.
        keys: The indices of the keys.
        reach: The most keys that a query sees, itself included; None if all before it.
        causal: Whether no query sees a later key, nor one beyond `reach`. Otherwise the mask function is asked.
        device: The device of the masks.
    """

    sees: MaskFunction
    batch: int
    queries: range
    keys: range
    reach: int | None
    causal: bool
    device: torch.device | str

    def __getitem__(self, index: tuple[slice, ...]) -> "BlockwiseMask":
        """Return the mask of some queries, indexed as (batch, head, queries, keys). Raise TypeError at another index.

        Layers of Gemma 4 that share the keys of others compute only the queries whose logits are needed.
        """
        if len(index) != 4:
            raise TypeError("a BlockwiseMask has no parts but queries")
        _, _, queries, _ = index
        return replace(self, queries=self.queries[queries])

    def alone(self, tokens: int) -> "BlockwiseMask | None":
        """Return the mask of a packed sequence of so many tokens by itself; None for plain causal attention."""
        if self.causal and (self.reach is None or tokens <= self.reach):
            return None
        return replace(self, queries=range(tokens), keys=range(tokens))

    @property
    def size(self) -> int:
        """Queries and keys of a block."""
        if torch.device(self.device).type == "cuda":
            return BLOCK_ON_GPU
        return min(BLOCK, self.reach or BLOCK)

    @cached_property
    def blocks(self) -> Sequence[Block]:
        """The blocks, as offsets into queries and keys; made once for all layers of a type."""
        starts = range(0, len(self.queries), self.size)
        return [self._block(slice(start, start + self.size)) for start in starts]

    def _block(self, rows: slice) -> Block:
        """Return the block of some queries. Its keys begin and end with whole blocks of keys."""
        if self.causal:
            queries = self.queries[rows]
            stop = queries[-1] + 1 - self.keys.start
            first = 0
            if self.reach:
                first = queries[0] + 1 - self.reach - self.keys.start
        else:
            everything = Block(rows, slice(None))
            visible = self.part(everything).any(dim=(0, 1, 2)).nonzero()
            first = int(visible.min()) if len(visible) else 0
            stop = int(visible.max()) + 1 if len(visible) else 1
        whole_blocks_before = max(0, first) // self.size
        whole_blocks_until = math.ceil(stop / self.size)
        return Block(rows, slice(whole_blocks_before * self.size, whole_blocks_until * self.size))

    def part(self, block: Block) -> torch.Tensor:
        """Return the boolean mask of a block: (batch, 1, queries, keys)."""
        batch = torch.arange(self.batch, device=self.device)[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=self.device)
        queries = self.queries[block.queries]
        keys = self.keys[block.keys]
        query = self._indices(queries)[None, None, :, None]
        key = self._indices(keys)
        visible = self.sees(batch, head, query, key)
        return visible.expand(-1, 1, len(queries), len(keys))

    def _indices(self, positions: range) -> torch.Tensor:
        return torch.arange(positions.start, positions.stop, device=self.device)


def blockwise_mask(*, use_vmap: bool = False, **arguments: Any) -> BlockwiseMask | torch.Tensor | None:
    """Return the mask of a layer type, with the arguments of `transformers.masking_utils.sdpa_mask`: None for plain
    causal attention, which needs none. A mask function that needs `use_vmap` may not broadcast, and is evaluated whole.
    """
    if use_vmap:
        mask: torch.Tensor | None = sdpa_mask(use_vmap=True, **arguments)
        return mask
    return _mask_of_blocks(**arguments)


def _mask_of_blocks(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **_: Any,
) -> BlockwiseMask | None:
    padding = None
    if attention_mask is not None and not attention_mask.all():
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask_function = and_masks(mask_function, padding_mask_function(padding))
    sees_all = local_size is None or kv_length < local_size
    aligned = q_length in (1, kv_length)
    if allow_is_causal_skip and padding is None and sees_all and aligned:
        return None
    return BlockwiseMask(
        sees=mask_function,
        batch=batch_size,
        queries=range(int(q_offset), int(q_offset) + q_length),
        keys=range(kv_offset, kv_offset + kv_length),
        reach=local_size,
        causal=allow_is_causal_skip,
        device=device,
    )


def blockwise_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockwiseMask | torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the output of attention, (batch, queries, heads, width), with the arguments of transformers' kernels.

    Sequences that are packed in a row are computed one after the other. Their bounds `cu_seq_lens_q` are those of
    FlashAttention: where each begins, and the number of tokens.
    """
    if cu_seq_lens_q is None:
        return _attention(module, query, key, value, attention_mask, **options)
    lengths = cu_seq_lens_q.diff().tolist()
    # Not slices: the gradient of each would have the size of the whole.
    split = [torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)]
    outputs = []
    for tokens, queries, keys, values in zip(lengths, *split, strict=True):
        mask = attention_mask
        if isinstance(mask, BlockwiseMask):
            mask = mask.alone(tokens)
        output, _ = _attention(module, queries, keys, values, mask, **options)
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockwiseMask | torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the output of attention for sequences that are not packed.

    Args:
        module: The attention layer.
        query: (batch, heads, queries, width).
        key: (batch, key heads, keys, width).
        value: (batch, key heads, keys, width).
        attention_mask: The mask that `blockwise_mask` returns, or a tensor that the model made.
        dropout: The share of weights that are dropped.
        scaling: The factor on the scores, by default 1/sqrt(width).
        softcap: The cap c of scores s: c tanh(s / c) (Gemma 2, section 2).
        s_aux: The attention sinks by head: the score of a key without value (gpt-oss).
        options: Arguments of `sdpa`.
    """
    some_queries = 1 < query.shape[2] < key.shape[2]
    if attention_mask is None and some_queries and getattr(module, "is_causal", True):
        # Without a mask, `sdpa` takes the queries for the first ones.
        attention_mask = _blocks_of(query, key, causal=True)
    if softcap is None and s_aux is None and not isinstance(attention_mask, BlockwiseMask):
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output, None
    mask = attention_mask
    if not isinstance(mask, BlockwiseMask):
        mask = _blocks_of(query, key, causal=attention_mask is None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    width = value.shape[-1]
    sink = None
    if s_aux is not None:
        assert softcap is None, "no model has both"
        query, key, value, sink = _with_sink_channels(query, key, value, s_aux / scale)
    query_blocks = torch.split(query, mask.size, dim=2)
    key_blocks = torch.split(key, mask.size, dim=2)
    value_blocks = torch.split(value, mask.size, dim=2)
    attend: Callable[..., Any] = partial(_attend, scale=scale, dropout=dropout, softcap=softcap)
    if softcap is not None:
        # Scores and weights of all blocks would be kept for the backward pass.
        attend = partial(checkpoint, attend, use_reentrant=False)
    outputs = []
    for queries, block in zip(query_blocks, mask.blocks, strict=True):
        if isinstance(attention_mask, torch.Tensor):
            visible = attention_mask[:, :, block.queries, block.keys]
        else:
            visible = mask.part(block)
        among = slice(block.keys.start // mask.size, block.keys.stop // mask.size)
        keys = key_blocks[among]
        values = value_blocks[among]
        if sink is not None:
            keys = (sink, *keys)
            values = (torch.zeros_like(value[:, :, :1]), *values)
            visible = pad(visible, (1, 0), value=visible.dtype == torch.bool)
        output = attend(queries, torch.cat(keys, dim=2), torch.cat(values, dim=2), visible)
        outputs.append(output[..., :width])
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _blocks_of(query: torch.Tensor, key: torch.Tensor, causal: bool) -> BlockwiseMask:
    """Return the mask of causal attention, whose last query sees the last key, or blocks of queries with every key."""
    keys = key.shape[2]
    first = keys - query.shape[2] if causal else keys
    return BlockwiseMask(
        sees=causal_mask_function,
        batch=1,
        queries=range(first, first + query.shape[2]),
        keys=range(keys),
        reach=None,
        causal=True,
        device=query.device,
    )


def _with_sink_channels(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value with more channels, and the key of the sink: 1 in the first new channel, else 0.

    The queries of a head have there the sink of the head, and so their product with that key is the score of the sink,
    for every kernel and its gradients. The value of the sink is 0, so the sink takes weight and gives nothing.
    """
    width = query.shape[-1]
    sink_of_head = sinks.to(query.dtype)[:, None, None]
    sink_of_query = sink_of_head.expand_as(query[..., :1])
    query = torch.cat([query, sink_of_query], dim=-1)
    query = pad(query, (0, SINK_CHANNELS - 1))
    key = pad(key, (0, SINK_CHANNELS))
    value = pad(value, (0, SINK_CHANNELS))
    sink = torch.zeros_like(key[:, :, :1])
    sink[..., width] = 1
    return query, key, value, sink


def _folded(query: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries of all heads that share keys as queries of one head, with their mask.

    Keys need not be repeated for the heads, and the products of matrices are larger.
    """
    batch, heads, queries, width = query.shape
    key_heads = keys.shape[1]
    groups = heads // key_heads
    folded = query.reshape(batch, key_heads, groups * queries, width)
    if visible.shape[1] == 1:
        return folded, visible.repeat(1, 1, groups, 1)
    return folded, visible.reshape(len(visible), key_heads, groups * queries, -1)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float,
    dropout: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return the output of one block: (batch, heads, queries, width). Scores are capped here, as no kernel of torch for
    CPUs does.
    """
    folded, mask = _folded(query, keys, visible)
    if softcap is None:
        output = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, dropout_p=dropout, scale=scale)
        return output.reshape(*query.shape[:-1], -1)
    scores = softcap * torch.tanh(folded @ keys.mT * scale / softcap)
    lowest = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    at_least_float32 = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=at_least_float32).to(values.dtype)
    output = drop(weights, dropout) @ values
    return output.reshape(*query.shape[:-1], -1)


def isolates_sequences(model: Any) -> bool:
    """Whether a model keeps the sequences of a row apart by their bounds, under the blockwise kernel, which is set, or
    FlashAttention. Layers with states, and models with code of their own or without a choice of the kernel, do not.
    """
    use_blockwise(model)
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or [])
    return (
        config._attn_implementation == BLOCKWISE
        and layer_types <= {FULL_ATTENTION, *LOCAL_ATTENTION}
        and config.model_type not in WITHOUT_BOUNDS
        and type(model).__module__.startswith("transformers.")
    )


def use_blockwise(model: Any) -> None:
    """Let a model compute with this kernel. Models that make masks themselves, and those whose code has no choice of a
    kernel, stay with transformers' default for them: `sdpa`, or `eager`.
    """
    if model.config.get_text_config().model_type not in MAKE_OWN_MASKS:
        model.set_attn_implementation(BLOCKWISE)


AttentionInterface.register(BLOCKWISE, blockwise_attention)
AttentionMaskInterface.register(BLOCKWISE, blockwise_mask)
