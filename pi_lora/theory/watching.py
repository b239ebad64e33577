"""Queries and keys taken from a model while it reads a text, and rotated back to position 0."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from pi_lora.data.corpus import evaluation_documents
from pi_lora.errors import DataError, ScalingError
from pi_lora.models.load import LoadedModel
from pi_lora.scaling.config import method_of
from pi_lora.theory.bounds import Complexes, Reals, Setting, coefficients, frequencies
from pi_lora.theory.heads import Attention, measure_layer, sampled_pairs
from pi_lora.types import Progress, silent

WATCHED = "pi_lora_watched"
TOKENS, PAIRS = 2048, 64  # of the text, at most the model's window; of each head
REPEATS = 64  # of one token, to see how a layer rotates
TOLERANCE = 0.05  # relative; rounding to bfloat16 gives 0.01, a wrong layout or frequency tenths

Saw = Callable[[int, torch.Tensor, torch.Tensor], None]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Rotation:
    """How the heads of a model rotate: `head_dim` numbers, the base, and what positions are divided by."""

    head_dim: int
    theta: float
    scale: float = 1.0

    def angles(self, positions: Positions) -> Reals:
        """Return radians, [positions, d / 2]."""
        return np.outer(positions / self.scale, frequencies(self.head_dim, self.theta))


def measure_attention(loaded: LoadedModel, text: Path, setting: Setting, progress: Progress = silent) -> Attention:
    """Take queries and keys from a model while it reads a text, and measure the scores they have at any distance.

    It reads no further than its own window, so that only the distance is beyond it. The pairs have a fixed seed.

    Raises:
        DataError: the text cannot be read, or has fewer than two tokens.
        ScalingError: the model is extended by another method than PI, or does not rotate as its config says.
    """
    if method_of(loaded.config) not in (None, "pi"):
        raise ScalingError(f"{loaded.name}: is not stretched by PI; the bounds are for its frequencies alone")
    first = next(iter(evaluation_documents(str(text))))
    ids = loaded.tokenizer(first.text, verbose=False)["input_ids"][: min(TOKENS, loaded.window)]
    if len(ids) < 2:
        raise DataError(f"{text}: holds {len(ids)} tokens; give a text of two or more")
    rotation = Rotation(setting.head_dim, setting.theta, loaded.scale)
    layers = layer_coefficients(loaded.model, ids, sampled_pairs(len(ids), PAIRS), rotation)
    heads, examples = [], []
    for done, (layer, h) in enumerate(layers.items(), 1):
        measured, example = measure_layer(layer, h, setting)
        heads += measured
        examples.append(example)
        progress(done, len(layers))
    return Attention(loaded.name, str(text), len(ids), PAIRS, heads, max(examples, key=lambda each: each[0].growth))


def layer_coefficients(
    model: Any, ids: Sequence[int], pairs: tuple[Positions, Positions], rotation: Rotation
) -> dict[int, Complexes]:
    """Return the `h` of pairs of tokens in a text by layer, [heads, pairs, d / 2].

    `pairs` are the positions of queries and of keys. Layers that do not rotate as `rotation` says (sliding ones with a
    rope of their own, those without) are left out; raises ScalingError if none is left.
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
            of_query = _rotated_back(query[:, queries_at], queries_at, layouts[layer], rotation)
            of_key = _rotated_back(key[:, keys_at], keys_at, layouts[layer], rotation)
            found[layer] = coefficients(of_query, np.repeat(of_key, len(of_query) // len(of_key), axis=0))

    _read(model, ids, saw)
    return dict(sorted(found.items()))


def _layouts(model: Any, token: int, rotation: Rotation) -> dict[int, Positions]:
    """By layer, the order in which the numbers of a head form pairs.

    In a text of one repeated token attention averages equal values, so a layer's queries differ by rotation only.
    """
    last = np.array([REPEATS - 1])
    halves_apart = np.arange(rotation.head_dim).reshape(2, -1).T.ravel()  # LLaMA in transformers
    adjacent = np.arange(rotation.head_dim)
    found: dict[int, Positions] = {}

    def saw(layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        for order in (halves_apart, adjacent):
            expected = _numbers(query[:, [0]])[..., order]
            difference = _rotated_back(query[:, last], last, order, rotation) - expected
            if np.linalg.norm(difference) < TOLERANCE * np.linalg.norm(expected):
                found[layer] = order

    _read(model, [token] * REPEATS, saw)
    return found


def _rotated_back(vectors: torch.Tensor, at: Positions, order: Positions, rotation: Rotation) -> Reals:
    """Queries or keys [heads, positions, width] before their rotation, in the paper's order."""
    numbers = _numbers(vectors)[..., order]
    plain = (numbers[..., ::2] + 1j * numbers[..., 1::2]) * np.exp(-1j * rotation.angles(at))
    return np.stack([plain.real, plain.imag], axis=-1).reshape(numbers.shape)


def _numbers(tensor: torch.Tensor) -> Reals:
    return np.asarray(tensor.to("cpu", torch.float64).numpy(), dtype=np.float64)


@torch.no_grad()
def _read(model: Any, ids: Sequence[int], saw: Saw) -> None:
    """Let the model read, and pass on each layer's rotated queries and keys, [heads, tokens, width]."""
    with _watched(model, saw):
        model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)


@contextmanager
def _watched(model: Any, saw: Saw) -> Iterator[None]:
    """Replace attention by PyTorch's own, which passes on its inputs."""

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
