"""Queries and keys of a real text, taken from a model while it reads, and turned back to before their rotation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from pi_lora.errors import ScalingError
from pi_lora.theory.bounds import Complexes, Reals, coefficients, frequencies

WATCHED = "pi_lora_watched"
REPEATS = 64  # of one token, to see how a layer rotates
NOT_ALIKE = 0.05  # relative; rounding to bfloat16 gives 0.01, a wrong layout or frequency tenths

Saw = Callable[[int, torch.Tensor, torch.Tensor], None]
Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class Rotation:
    """How the heads of a model rotate: `head_dim` numbers, the base, and what positions are divided by."""

    head_dim: int
    theta: float
    scale: float = 1.0

    def angles(self, positions: NDArray[np.int64]) -> Reals:
        """In radians, [positions, d / 2]."""
        return np.outer(positions / self.scale, frequencies(self.head_dim, self.theta))


def layer_coefficients(
    model: Any, ids: Sequence[int], pairs: Pairs, rotation: Rotation, progress: Callable[[int, int], None] | None = None
) -> dict[int, Complexes]:
    """The `h` of pairs of tokens in a text, by layer: [heads, pairs, d / 2].

    `pairs` are the positions of queries and of keys. Layers that do not rotate as `rotation` says (sliding ones with a
    rope of their own, those without) are left out.

    Raises:
        ScalingError: no layer does.
    """
    layouts = _layouts(model, ids[0], rotation)
    if not layouts:
        raise ScalingError(
            f"model of type {model.config.model_type}: no layer rotates its queries as the config says; "
            "its scores cannot be taken apart"
        )
    found: dict[int, Complexes] = {}
    queries_at, keys_at = pairs

    def saw(layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        if layer in layouts:
            of_query = _turned_back(query[:, queries_at], queries_at, layouts[layer], rotation)
            of_key = _turned_back(key[:, keys_at], keys_at, layouts[layer], rotation)
            found[layer] = coefficients(of_query, np.repeat(of_key, len(of_query) // len(of_key), axis=0))
            if progress:
                progress(len(found), len(layouts))

    _read(model, ids, saw)
    return dict(sorted(found.items()))


def _layouts(model: Any, token: int, rotation: Rotation) -> dict[int, Any]:
    """By layer, the order in which the numbers of a head make pairs.

    In a text of one token repeated, attention averages equal values, so that every layer sees the same at all positions
    and its queries differ by their rotation alone.
    """
    last = np.array([REPEATS - 1])
    found = {}

    def saw(layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        first, turned = _numbers(query[:, [0]]), query[:, last]
        for order in _orders(rotation.head_dim):
            expected = first[..., order]
            difference = _turned_back(turned, last, order, rotation) - expected
            if np.linalg.norm(difference) < NOT_ALIKE * np.linalg.norm(expected):
                found[layer] = order

    _read(model, [token] * REPEATS, saw)
    return found


def _orders(head_dim: int) -> Iterator[NDArray[np.int64]]:
    """Where the numbers of the paper's pairs stand in a head: half of it apart (LLaMA in transformers), or in a row."""
    yield np.arange(head_dim).reshape(2, -1).T.ravel()
    yield np.arange(head_dim)


def _turned_back(vectors: torch.Tensor, at: NDArray[np.int64], order: NDArray[np.int64], rotation: Rotation) -> Reals:
    """Rotated queries or keys [heads, positions, width] in the paper's order, as before they were rotated."""
    numbers = _numbers(vectors)[..., order]
    plain = (numbers[..., ::2] + 1j * numbers[..., 1::2]) * np.exp(-1j * rotation.angles(at))
    return np.stack([plain.real, plain.imag], axis=-1).reshape(numbers.shape)


def _numbers(tensor: torch.Tensor) -> Reals:
    return np.asarray(tensor.to("cpu", torch.float64).numpy(), dtype=np.float64)


@torch.no_grad()
def _read(model: Any, ids: Sequence[int], saw: Saw) -> None:
    """Let the model read, and hand on each layer's rotated queries and keys, [heads, tokens, width]."""
    with _watched(model, saw):
        model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)


@contextmanager
def _watched(model: Any, saw: Saw) -> Iterator[None]:
    """Attention as PyTorch computes it, which shows what it gets."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        saw(module.layer_idx, query[0], key[0])
        output = functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=options.get("scaling"), enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register(WATCHED, attend)
    AttentionMaskInterface.register(WATCHED, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(WATCHED)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
